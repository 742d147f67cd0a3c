"""SavedUnit: the state that autograd keeps of a unit, how the unit is gathered again, and when it is freed."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import funcshard as fs
from funcshard.comm.topology import Topology
from funcshard.core.buffer_comm import BufferComm, start_gathers
from funcshard.core.prefetcher import Prefetcher, SavedUnit

PARAMS = {"w": torch.arange(6.0).reshape(2, 3), "v": torch.arange(5.0)}


def saved_of(mesh, prefetcher=None):
    """Return the saved state of one unit, its gathered buffers, and its shard."""
    plan = fs.make_plan(PARAMS, mesh)
    unit, shard = plan.units[""], fs.shard(PARAMS, plan, mesh)[""]
    comms = [BufferComm(Topology(mesh, unit.sharded), unit.name, buffer.key) for buffer in unit.buffers]
    f = dataclasses.replace(fs.unshard(lambda leaves: leaves, unit, mesh), comms=tuple(comms))
    saved = SavedUnit(f, shard, prefetcher)
    gathered = f.gather(shard)
    saved.watch(gathered)
    fulls = [
        leaves[0].as_strided((buffer.padded_numel,), (1,), 0) for leaves, buffer in zip(gathered, unit.buffers, strict=True)
    ]
    return saved, fulls, shard


@pytest.mark.slow
def test_a_view_of_the_gathered_buffer_is_packed_without_it_and_comes_back_the_same():
    def main(mesh):
        saved, (full,), _ = saved_of(mesh)
        view = full[1:7].view(3, 2).t()
        wanted, form = view.clone(), (view.shape, view.stride(), view.storage_offset())
        assert not saved.needed
        packed, ref = saved.pack(view), StorageWeakRef(full.untyped_storage())
        assert saved.needed
        del full, view
        gc.collect()
        assert ref.expired()
        with fs.record_events() as events:
            back, again = saved.unpack(packed), saved.unpack(packed)
        assert (back.shape, back.stride(), back.storage_offset()) == form
        assert back.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
        return torch.equal(back, wanted), [event.kind for event in events]

    assert fs.simulate(main, 2) == [(True, ["all_gather"])] * 2


def test_a_tensor_of_no_gathered_buffer_is_saved_unchanged():
    def main(mesh):
        saved, (full,), _ = saved_of(mesh)
        other, cast = torch.ones(3), full.view(torch.int32)
        same = [
            saved.unpack(saved.pack(t)).untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in (other, cast)
        ]
        return all(same) and not saved.needed

    assert fs.simulate(main, 2) == [True, True]


def test_a_tensor_of_no_gathered_buffer_goes_to_the_outer_hooks():
    def main(mesh):
        with saved_tensors_hooks(lambda t: ("kept", t), lambda pair: pair[1] + 1):
            saved, (full,), _ = saved_of(mesh)
            pack, unpack = saved.hooks()
        return unpack(pack(torch.zeros(2))).tolist(), torch.equal(unpack(pack(full)), full)

    assert fs.simulate(main, 2) == [([1.0, 1.0], True)] * 2


def test_an_all_gather_that_was_started_ahead_is_used_and_not_repeated():
    def main(mesh):
        saved, (full,), _ = saved_of(mesh)
        packed = saved.pack(full)
        states = [(saved.started, saved.gathered)]
        with fs.record_events() as events:
            saved.receive(start_gathers(saved.sources()))
            states.append((saved.started, saved.gathered))
            back = saved.unpack(packed)
            states.append((saved.started, saved.gathered))
            saved.post_backward()()
            states.append((saved.started, saved.gathered))
        return states, len(events), torch.equal(back, full)

    states = [(False, False), (True, False), (False, True), (False, False)]
    assert fs.simulate(main, 2) == [(states, 1, True)] * 2


def test_the_buffer_is_free_when_the_unit_is_released_though_packed_tensors_remain():
    def main(mesh):
        saved, (full,), _ = saved_of(mesh)
        packed = saved.pack(full)
        ref = StorageWeakRef(saved.unpack(packed).untyped_storage())
        alive = ref.expired()
        saved.post_backward()()
        return alive, ref.expired(), torch.equal(saved.unpack(packed), full)  # and it can be gathered again

    assert fs.simulate(main, 2) == [(False, True, True)] * 2


def test_post_backward_reaches_the_prefetcher_although_no_saved_tensor_is_left():
    class Noted(Prefetcher):
        def post_backward(self, use):
            uses.append(use)

    uses = []
    mesh = fs.Mesh()
    prefetcher = Noted(fs.Schedule(("",), True, "post", 1), lambda name: [], known=True)
    saved = saved_of(mesh, prefetcher)[0]
    post_backward, ref = saved.post_backward(), weakref.ref(saved)
    del saved
    assert ref() is None
    post_backward()
    assert uses == [0]
