"""unshard and reshard: lifetimes of gathered buffers, gathers that start early, and leaves that are read-only."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard._utils import tree
from funcshard.testing import delayed
from tests.core.units import by_hand, each_by_hand, of_module, recorded, requiring_grad, same_bits
from tests.module.law import Runs
from tests.ranks import on_ranks, run_ranks, run_simulated
from tests.storages import Log

PARAMS = {
    "w": torch.linspace(-1, 1, 35).reshape(5, 7),
    "b": torch.linspace(0, 1, 7),
    "v": torch.linspace(-1, 0, 35).reshape(7, 5),
}
X = torch.linspace(-2, 2, 15).reshape(3, 5)


def layer(leaves, x):
    return torch.tanh(x @ leaves["w"] + leaves["b"]) @ leaves["v"] + x


def one_unit(mesh, apply, combine=fs.reshard):
    plan, f, shards = by_hand(mesh, PARAMS, apply, how=combine)
    return f, shards[""], plan


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("operation", [torch.tanh, torch.relu], ids=lambda f: f.__name__)
@on_ranks(2)
def test_a_graph_that_is_dropped_without_backward_is_freed(mesh, operation):
    """Each of these operations saves its own result, which must not keep the graph behind it alive."""
    log = Log()

    def apply(leaves, x):
        out = operation(x @ leaves["w"])
        log(out)
        return out

    f, shard, _ = one_unit(mesh, apply)
    out = f(requiring_grad(shard), X)
    assert log.alive() == 1
    del out
    assert log.alive() == 0


@on_ranks(2)
def test_a_saved_tensor_that_is_changed_in_place_is_an_error_not_a_wrong_gradient(mesh):
    f, shard, _ = one_unit(mesh, lambda leaves, x: torch.exp(x @ leaves["w"]))
    out = f(requiring_grad(shard), X)
    out.detach().mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \(3, 7\) that unit '\(root\)' needs for its gradients was modified"):
        out.sum().backward()


def rows_of(x):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))


# For each layout: a function of a weight and an input that saves tensors of that layout.
LAYOUTS = {
    "COO": lambda w, x: torch.sparse.mm(torch.eye(3).to_sparse(), x @ w),
    "CSR": lambda w, x: torch.eye(3).to_sparse_csr() @ (x @ w),
    "COO of the leaf": lambda w, x: torch.sparse.mm(
        torch.sparse_coo_tensor(torch.arange(3).repeat(2, 1), w[0, :3], (3, 3), check_invariants=False), x
    ),
    "mkldnn": lambda w, x: torch.relu(x.to_mkldnn()).to_dense() @ w,
    "jagged": lambda w, x: torch.tanh(rows_of(x) @ w).values(),
    "jagged of the leaf": lambda w, x: torch.tanh(rows_of(w)).values()[:3],
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # torch 2.11
@pytest.mark.filterwarnings("ignore:Sparse CS[CR] tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_unit_may_save_tensors_that_are_sparse_opaque_or_nested(mesh, layout):
    x = X.clone().requires_grad_()
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    value = LAYOUTS[layout](leaves["w"], x).square().sum()
    wanted, wanted_x = torch.autograd.grad(value, [leaves["w"], x], allow_unused=True)
    f, shard, plan = one_unit(mesh, lambda leaves, x: LAYOUTS[layout](leaves["w"], x))
    x = X.clone().requires_grad_()
    shard = requiring_grad(shard)
    loss = f(shard, x).square().sum()
    grad_x = torch.autograd.grad(loss, x, allow_unused=True, retain_graph=True)[0]
    torch.testing.assert_close(grad_x, wanted_x)
    torch.testing.assert_close(loss, value.detach())
    grads = dict(zip(shard, torch.autograd.grad(loss, shard.values()), strict=True))
    torch.testing.assert_close(fs.gather({"": grads}, plan, mesh)["w"], 2 * wanted)


# For each layout: a function that puts the elements of a leaf into a tensor without copying them.
AROUND = {
    "COO": lambda w: torch.sparse_coo_tensor(torch.arange(7)[None], w[0], check_invariants=False),
    "CSR": lambda w: torch.sparse_csr_tensor(torch.tensor([0, 3, 7]), torch.arange(7), w[0], (2, 7), check_invariants=False),
    "jagged": rows_of,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", AROUND)
@on_ranks(2)
def test_a_result_that_holds_a_leaf_inside_does_not_share_its_memory(mesh, layout):
    seen = []

    def around(leaves):
        seen.append(leaves["w"].untyped_storage().data_ptr())
        return AROUND[layout](leaves["w"])

    f, shard, _ = one_unit(mesh, around)
    handle = f.start(shard)
    out = f(handle).detach()
    values = out._values() if layout == "COO" else out.values()
    assert values.untyped_storage().data_ptr() not in seen
    assert values.flatten()[:7].tolist() == PARAMS["w"][0].tolist()


# --- gathers that start early ---------------------------------------------------------------------


SIZE, BLOCKS = 4, 3
LAYERS = {"blocks": [{"w": torch.eye(SIZE) + 0.1 * number, "b": torch.ones(SIZE)} for number in range(BLOCKS)]}


def block(leaves, x):
    return torch.tanh(x @ leaves["w"] + leaves["b"])


def functions(mesh, freed, apply=block):
    how, strategy = (fs.reshard, "full_shard") if freed else (lambda f: f, "shard_grad_op")
    names = [f"blocks.{number}" for number in range(BLOCKS)]
    return each_by_hand(mesh, LAYERS, dict.fromkeys(names, apply), how=how, strategy=strategy)


def batch_of(mesh):
    return torch.linspace(-1, 1, 2 * SIZE).view(2, SIZE).mul(mesh.rank + 1).requires_grad_()


def run_by_hand(fns, shards, x, ahead):
    """Run the blocks in order; ``ahead`` gathers are started before each one computes, 0 for none."""
    names, started = list(fns), {}
    for number, name in enumerate(names):
        for later in names[number : number + ahead + 1] if ahead else ():
            if later not in started:
                started[later] = fns[later].start(shards[later])
        x = fns[name](started[name] if ahead else shards[name], x)
        started[name] = None
    return x.square().mean()


def step(mesh, freed, ahead, seen=None):
    """Return plan, results and events; ``seen`` gets the number of gathers started as each block computes."""

    def apply(leaves, x):
        if seen is not None:
            seen.append(len(events))
        return block(leaves, x)

    plan, fns, shards = functions(mesh, freed, apply)
    with fs.record_events() as events:
        loss, grads = fs.value_and_grad(lambda s, x: run_by_hand(fns, s, x, ahead))(shards, batch_of(mesh))
    return plan, (loss, fs.gather(grads, plan, mesh)), tuple(events)


@pytest.mark.parametrize(("freed", "ahead"), [(True, 1), (True, 2), (False, 2)])
@on_ranks(2)
def test_gathers_started_ahead_come_in_the_predicted_order_and_change_no_bit(mesh, freed, ahead):
    _, plain, on_demand = step(mesh, freed, 0)
    plan, found, events = step(delayed(mesh, "all_gather", 0.002), freed, ahead, seen := [])  # NaN until it is waited for
    schedule = fs.make_schedule(plan, limit=ahead, backward_prefetch=None)
    assert events == fs.predict_events(plan, schedule)
    assert events == on_demand  # early, and in the same order
    assert seen == [min(number + 1 + ahead, BLOCKS) for number in range(BLOCKS)]
    same_bits(found, plain)


@pytest.mark.usefixtures("without_garbage_collection")
@on_ranks(2)
def test_several_calls_share_one_handle_of_unshard_and_one_copy(mesh):
    log, results = Log(), []

    def apply(leaves, x):
        log(leaves["w"])
        return block(leaves, x)

    plan, fns, shards = functions(mesh, False, apply)
    f, x = fns["blocks.1"], batch_of(mesh)

    def twice(shards, started):
        shard = f.start(shards["blocks.1"]) if started else shards["blocks.1"]
        return (f(shard, x) * f(shard, -x)).sum()

    for started, gathers in ((True, 1), (False, 2)):
        (loss, grads), events = recorded(fs.value_and_grad(twice), shards, started)
        assert sum(event.kind == "all_gather" for event in events) == gathers
        results.append((loss, fs.gather(grads, plan, mesh)))
    same_bits(*results)
    assert log.alive() == 0


@pytest.mark.parametrize("freed", [True, False], ids=["reshard", "unshard"])
@on_ranks(2)
def test_a_checkpoint_around_a_call_and_torch_func_take_a_handle(mesh, freed):
    plan, fns, shards = functions(mesh, freed)
    x = batch_of(mesh)

    def loss_fn(shards, around, started):
        f, shard = fns["blocks.1"], shards["blocks.1"]
        shard = f.start(shard) if started else shard
        return (checkpoint(f, shard, x, use_reentrant=False) if around else f(shard, x)).square().mean()

    plain = fs.gather(fs.value_and_grad(loss_fn)(shards, False, False)[1], plan, mesh)
    again = fs.gather(fs.value_and_grad(loss_fn)(shards, True, True)[1], plan, mesh)
    same_bits(again, plain)
    added = fs.gather(torch.func.grad(loss_fn)(shards, False, True), plan, mesh)
    torch.testing.assert_close(added["blocks"][1]["w"], plain["blocks"][1]["w"] * mesh.world_size)


def unused_then_step(mesh):
    _, fns, shards = functions(mesh, True)
    fns["blocks.0"].start(shards["blocks.0"]).wait()
    fns["blocks.1"].start(shards["blocks.1"])  # and one that nothing waits for
    return step(mesh, True, 1)[1], step(mesh, True, 0)[1]


@pytest.mark.parametrize("run", [run_simulated, run_ranks])
def test_a_handle_that_is_not_used_leaves_nothing_that_later_gathers_wait_for(run):
    for found, expected in run(unused_then_step, 2):
        same_bits(found, expected)


def loss_of(run, handle, x):
    return lambda shards: run["blocks.1"](shards["blocks.1"], run["blocks.0"](handle, x)).sum()


MISTAKES = {  # programs of the functions, the shards, a handle of block 0 and an input
    "of another unit": (
        lambda run, shards, handle, x: run["blocks.1"](handle, x),
        ValueError, r"handle of unit 'blocks\.0' was passed to a function of unit 'blocks\.1'; pass it",
    ),
    "used again": (
        lambda run, shards, handle, x: run["blocks.0"](handle, run["blocks.0"](handle, x)),
        ValueError, r"handle of unit 'blocks\.0' was used before, .*; call start for each call, or use",
    ),
    "a changed shard": (
        lambda run, shards, handle, x: shards["blocks.0"]["float32"].mul_(2) is run["blocks.0"](handle, x),
        RuntimeError, r"a shard of unit 'blocks\.0' was modified in place after its gather had started",
    ),
    "started outside": (
        lambda run, shards, handle, x: fs.value_and_grad(loss_of(run, handle, x))(shards),
        ValueError, r"started outside of this call of value_and_grad, .*; call start inside loss_fn",
    ),
    "of all shards": (lambda run, shards, handle, x: run["blocks.0"].start(shards), ValueError, r"blocks\.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
@on_ranks(2)
def test_what_a_handle_cannot_do_is_refused(mesh, name):
    (program, error, words), (_, run, shards) = MISTAKES[name], functions(mesh, True)
    with pytest.raises(error, match=words):
        program(run, shards, run["blocks.0"].start(shards["blocks.0"]), batch_of(mesh))


# --- read-only leaves -----------------------------------------------------------------------------


WIDTH = 200  # a weight of 160 kB: so large that ranks share its gathered memory


CHANGES: dict[str, Any] = {  # functions of a weight
    "clamped": torch.no_grad()(lambda w: w.clamp_(-0.5, 0.5)),
    "renormed": lambda w: F.embedding(torch.arange(2), w, max_norm=0.5),
    "written through detach": lambda w: w.detach().mul_(2.0),
    "a part of it": torch.no_grad()(lambda w: w[0].zero_()),
}
THROUGH_DATA: dict[str, Any] = {  # no version of the weight counts these
    "data written to": lambda w: w.data.mul_(2.0),
    "a part of data": lambda w: w.data[0].sub_(1.0),
    "other data": lambda w: setattr(w, "data", 2.0 * w.data),
    "data of another shape": lambda w: setattr(w, "data", torch.ones(WIDTH, 1)),
}
RETURNS: dict[str, Any] = {  # results for a weight and an input
    "itself": lambda w, x: w,
    "a part": lambda w, x: w[:3],
    "in a tuple": lambda w, x: (x @ w, w),
    "deep inside": lambda w, x: (x @ w, [{"weight": w}]),
}


def treat(layer: Any, x: torch.Tensor, what: str) -> Any:
    if what in RETURNS:
        return RETURNS[what](layer.weight, x)
    {**CHANGES, **THROUGH_DATA}[what](layer.weight)
    return x @ layer.weight


def made(mesh: fs.Mesh, what: str, strategy: str = "full_shard") -> Any:
    if mesh.world_size > 1 and type(mesh.shard).__name__ == "TorchGroup":
        mesh = fs.init_mesh(mesh.shape, device="cpu")
    run, leaves = functools.partial(treat, what=what), {"weight": torch.eye(WIDTH), "bias": torch.zeros(WIDTH)}
    number = 1 if what in RETURNS else 2
    layers = [Runs(run, **{name: nn.Parameter(leaf) for name, leaf in leaves.items()}) for _ in range(number)]
    _, sharded, shards = of_module(mesh, nn.Sequential(*layers), ["*"], strategy=strategy)
    return sharded, shards


@pytest.mark.parametrize("what", CHANGES)
@on_ranks(2)
def test_a_leaf_that_forward_modifies_is_named(mesh: fs.Mesh, what) -> None:
    words = (
        r"^the forward of unit '0' modified a leaf in place, one of buffer 'float32' .*\('0.bias', '0.weight'\); gathered "
        "leaves are read-only.*modify a copy, keep values that change in a buffer of the module, or change the shards"
    )
    (sharded, shards), x = made(mesh, what), torch.ones(2, WIDTH)
    with torch.no_grad(), pytest.raises(RuntimeError, match=words):
        sharded(shards, {}, x)
    with pytest.raises(RuntimeError, match=words.partition(" .*")[0]):  # in a graph, torch itself refuses some writes
        fs.value_and_grad(lambda s: sharded(s, {}, x).sum())(shards)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("change", THROUGH_DATA)
@on_ranks(2)
def test_a_leaf_that_forward_modifies_through_data_is_named(mesh: fs.Mesh, strategy, change) -> None:
    (sharded, shards), x = made(mesh, change, strategy), torch.ones(2, WIDTH)
    shards = tree.map(torch.clone, shards)
    words = r"^the forward of unit '0' wrote to '0.weight' through .data; gathered leaves are read-only"
    with torch.no_grad(), pytest.raises(RuntimeError, match=words):
        sharded(shards, {}, x)
    with pytest.raises(RuntimeError, match=words):
        fs.value_and_grad(lambda s: sharded(s, {}, x).sum())(shards)


def test_a_forward_is_compared_until_it_leaves_its_leaves_alone_and_then_no_more() -> None:
    writes = [False, True]
    _, f, shards = by_hand(fs.Mesh(), {"w": torch.ones(3)}, lambda leaves: writes.pop() and leaves["w"].data.zero_())
    with pytest.raises(RuntimeError, match=r"wrote to 'w' through .data"):
        f(shards[""])
    assert f.first_look.pending
    f(shards[""])
    assert not f.first_look.pending


@on_ranks(2)
def test_a_write_that_torch_itself_refuses_is_named_too(mesh: fs.Mesh) -> None:
    _, f, shards = by_hand(mesh, {"w": torch.ones(3)}, lambda leaves: leaves["w"].mul_(2.0).sum())
    words = r"the forward of unit '\(root\)' modified a leaf in place; gathered leaves are read-only"
    with pytest.raises(RuntimeError, match=words):
        f(requiring_grad(shards[""]))


def added(out: Any) -> torch.Tensor:
    return sum(leaf.sum() for leaf in tree.leaves(out))


# What calls a function of shards.
CALLS: dict[str, Any] = {
    "with gradients": lambda f, shards: f(requiring_grad(shards)),
    "without gradients": torch.no_grad()(lambda f, shards: f(shards)),
    "grad": lambda f, shards: torch.func.grad(lambda s: (added(out := f(s)), out), has_aux=True)(shards)[1],
    "vmap": lambda f, shards: torch.vmap(f)(tree.map(lambda shard: torch.stack([shard] * 3), shards)),
}


def give_out(mesh: fs.Mesh, what: str, call: str, strategy: str) -> tuple[bool, ...]:
    (sharded, shards), x = made(mesh, what, strategy), torch.ones(2, WIDTH)
    first = tree.leaves(CALLS[call](lambda s: sharded(s, {}, x), shards))
    before = [each.detach().clone() for each in first]
    if mesh.rank == 0:
        for each in first:
            each.detach().zero_()
    fs.psum(torch.ones(1), mesh)  # rank 1 compares after rank 0 has written
    again = tree.leaves(CALLS[call](lambda s: sharded(s, {}, x), shards))
    same = mesh.rank == 0 or all(map(torch.equal, first, before))
    return same, all(map(torch.equal, again, before)), first[0].requires_grad == (call == "with gradients")


def give_out_each(mesh: fs.Mesh, call: str, strategy: str) -> dict[str, tuple[bool, ...]]:
    return {what: give_out(mesh, what, call, strategy) for what in RETURNS}


GIVEN_OUT = [(run_ranks, call, strategy) for call, strategy in zip(CALLS, ["full_shard", "shard_grad_op"] * 2, strict=True)]
GIVEN_OUT += [(run_simulated, call, "full_shard") for call in ("grad", "vmap")]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there do ranks share memory")
@pytest.mark.parametrize(("run", "call", "strategy"), GIVEN_OUT)
def test_a_returned_leaf_may_be_written_to(run, call, strategy) -> None:
    for found in run(give_out_each, 2, call, strategy):
        assert found == dict.fromkeys(RETURNS, (True, True, True))


def hold_the_model(mesh: fs.Mesh) -> int:
    mesh = fs.init_mesh(mesh.shape, device="cpu")
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    _, sharded, shards = of_module(mesh, nn.Sequential(*layers), ["*"], strategy="shard_grad_op")
    out = sharded(requiring_grad(shards), {}, torch.ones(1, WIDTH))
    fs.psum(torch.ones(1), mesh)
    pool = mesh.shard.shm.blocks
    held = pool.made - len(pool._free)
    out.sum().backward()
    return held


@pytest.mark.skipif(sys.platform != "linux", reason="only there do ranks share memory")
def test_a_model_that_stays_gathered_is_in_memory_once() -> None:
    first, second, third = run_ranks(hold_the_model, 3)
    assert first in (6, 7)  # one block for each unit, and one for tiny buffers
    assert max(second, third) <= 2
