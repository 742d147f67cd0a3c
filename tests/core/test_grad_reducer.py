"""GradReducer: the stages of a reduction; which gradients it holds, when it copies and frees them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import funcshard as fs
from funcshard._utils import tree
from funcshard.comm.group import DeferredWork, LocalGroup
from funcshard.comm.mesh import Mesh, Topology
from funcshard.core.buffer_comm import BufferComm
from funcshard.core.grad_reducer import GradReducer, activate
from tests.core.units import each_by_hand, mlp, of_module, recorded, same_bits
from tests.module.law import Runs
from tests.ranks import on_ranks, run_ranks
from tests.storages import Alive

GRID = {"replicate": 2, "shard": 2}
UNITS = ["0", "2", "4"]
ROWS, MICRO = 24, 3
net = functools.partial(mlp, 3, 5, 5, 5, 2)


def rows(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)


def setup(mesh: fs.Mesh, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a plan, the sharded function, the shards, a loss function, and this rank's rows."""
    plan, sharded, shards = of_module(mesh, net(dtype=dtype), UNITS, **options)
    mine = rows(dtype).chunk(mesh.world_size)[mesh.rank]
    return plan, sharded, shards, lambda shards, x: sharded(shards, {}, x).square().mean(), mine


def predicted_on(world: Any, reduce: Any, **options: Any) -> Any:
    plan = fs.make_plan(fs.make_functional(net())[1], world, units=UNITS, **options)
    return fs.predict_events(plan, accumulate=fs.Accumulation(MICRO, reduce))


def reductions(reduce: Any, **options: Any) -> list[tuple[str, str, int]]:
    """Return kind, unit and number of the predicted reductions of three micro-batches."""
    events = [(e.kind, e.unit) for e in predicted_on(GRID, reduce, **options) if "reduce" in e.kind]
    return [(*event, events.count(event)) for event in sorted(set(events))]


def test_the_all_reduces_wait_for_the_last_micro_batch() -> None:
    names = ["", *UNITS]
    once, each = ([("all_reduce", name, 1) for name in names], [("reduce_scatter", name, MICRO) for name in names])
    assert reductions("shard_each") == once + each
    assert reductions({"2": "once", "4": "shard_each"}) == [
        ("all_reduce", "", 3), ("all_reduce", "0", 3), ("all_reduce", "2", 1), ("all_reduce", "4", 1),
        ("reduce_scatter", "", 3), ("reduce_scatter", "0", 3), ("reduce_scatter", "2", 1), ("reduce_scatter", "4", 3),
    ]  # fmt: skip
    # Along a model axis that a leaf is not cut along, its gradients wait alike.
    tensor = [e.axis for e in predicted_on({"replicate": 2, "shard": 2, "tensor": 2}, "shard_each") if "reduce" in e.kind]
    assert {axis: tensor.count(axis) for axis in tensor} == {"shard": 4 * MICRO, "replicate": 4, "tensor": 4}
    # Two all-reduces of each unit, over the shard axis and over the replicate axis.
    assert reductions("shard_each", strategy="no_shard") == [("all_reduce", name, 2) for name in names]
    # A group of small units is reduced once, and a glob of them chooses for it.
    assert reductions({"*": "shard_each"}, bucket_bytes=1 << 20) == [
        ("all_reduce", "", 3), ("all_reduce", "0…4", 1), ("reduce_scatter", "", 3), ("reduce_scatter", "0…4", 3),
    ]  # fmt: skip


def test_between_micro_batches_only_a_slice_of_each_gradient_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    post_backward = GradReducer.post_backward

    def look(reducer: GradReducer) -> None:
        post_backward(reducer)
        assert all(leaf.held is None for leaf in reducer.leaves)
        partial = [leaf.partial for leaf in reducer.leaves if leaf.partial is not None]
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in partial))

    monkeypatch.setattr(GradReducer, "post_backward", look)

    def main(mesh: fs.Mesh) -> int:
        plan, _, shards, loss_fn, _ = setup(mesh, bucket_bytes=1 << 20)
        fs.accumulate(loss_fn, 2, reduce="shard_each")(shards, rows())
        return sum(buffer.shard_numel * 8 for unit in plan.unit_list for buffer in unit.buffers)

    shard_bytes = fs.simulate(main, GRID)[0]
    assert sorted(kept) == [0] * 4 + [shard_bytes] * 4


@pytest.mark.parametrize("reduce", ["each", "once", "shard_each", {"a": "shard_each"}], ids=str)
@on_ranks(GRID)
def test_a_unit_that_the_last_micro_batch_leaves_out_is_all_reduced_all_the_same(mesh: fs.Mesh, reduce: Any) -> None:
    params = {"a": torch.linspace(1, 2, 5), "b": torch.linspace(3, 4, 5)}
    functions = dict.fromkeys(params, lambda leaf, x: (leaf * leaf * x).sum())
    plan, f, shards = each_by_hand(mesh, params, functions, how=lambda f: f)
    twice = lambda s, x: f["a"](s["a"], x) + f["a"](s["a"], x)  # noqa: E731
    loss_fn = lambda s, x: f["b"](s["b"], x) + (twice(s, x) if x > 0 else 0.0)  # noqa: E731
    (_, grads), events = recorded(fs.accumulate(loss_fn, 3, reduce=reduce), shards, torch.tensor([3.0, 6.0, -1.0]))
    times = [event.unit for event in events if event.kind == "all_reduce"].count("a")
    assert reduce == "each" or times == 1
    grads = fs.gather(grads, plan, mesh)
    torch.testing.assert_close(grads, {"a": 2 * 2 * params["a"] * 3, "b": 2 * params["b"] * 8 / 3})


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["each", "once", "shard_each"])
@on_ranks(GRID)
def test_the_hook_sees_the_sum_over_the_shard_axis_before_each_all_reduce(mesh: fs.Mesh, reduce: str) -> None:
    calls, factors = {"each": 2, "once": 1, "shard_each": 1}[reduce], {"": 2, "2": 3}
    plan, _, shards, loss_fn, mine = setup(mesh, bucket_bytes=0 if reduce == "each" else 1 << 20)
    seen: dict[str, list[torch.Tensor]] = {unit: [] for unit in plan.units}

    def hook(unit: str, key: str, partial: torch.Tensor) -> Any:
        assert key == "float64"
        seen[unit].append(partial.clone())
        if unit == "2":
            return partial * 3
        return partial.mul_(2) if unit == "" else None

    _, grads = fs.accumulate(loss_fn, 2, reduce=reduce, on_reduce_scattered=hook)(shards, mine)
    assert {len(each) for each in seen.values()} == {calls}
    for unit, own in fs.accumulate(loss_fn, 2, reduce=reduce)(shards, mine)[1].items():
        torch.testing.assert_close(grads[unit]["float64"], own["float64"] * factors.get(unit, 1))
        # The sums of the two rows add up to the sum over the world.
        torch.testing.assert_close(fs.psum(sum(seen[unit]), mesh, axis="replicate"), 4 * own["float64"])


@pytest.mark.parametrize(("world", "strategy"), [(2, "full_shard"), (2, "no_shard"), (1, "full_shard"), (GRID, "no_shard")])
@on_ranks()
def test_without_a_second_stage_the_hook_sees_the_whole_sum_and_copies_see_their_own(
    mesh: fs.Mesh, world: Any, strategy: str
) -> None:
    _, _, shards, loss_fn, mine = setup(mesh, strategy=strategy)
    seen: dict[str, torch.Tensor] = {}
    hook = lambda unit, key, partial: seen.update({unit: partial.clone()})  # noqa: E731
    for unit, grad in fs.value_and_grad(loss_fn, on_reduce_scattered=hook)(shards, mine)[1].items():
        total = fs.psum(seen[unit], mesh) if strategy == "no_shard" else seen[unit]
        torch.testing.assert_close(total, grad["float64"] * mesh.world_size)


@on_ranks(GRID)
def test_sums_that_wait_have_the_reduce_dtype(mesh: fs.Mesh) -> None:
    precision, dtypes = fs.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32), set()
    _, _, shards, loss_fn, mine = setup(mesh, torch.float32, precision=precision)
    hook = lambda unit, key, partial: dtypes.add(partial.dtype)  # noqa: E731
    evaluate = fs.accumulate(lambda s, x: loss_fn(s, x).float(), 2, reduce="shard_each", on_reduce_scattered=hook)
    grads = tree.leaves(evaluate(shards, mine)[1])
    assert dtypes == {torch.float32}
    assert all(leaf.dtype == torch.float32 and leaf.isfinite().all() for leaf in grads)


@pytest.mark.parametrize(("stays", "gathers"), [(False, 2), (True, 1)], ids=["freed", "stays"])
@on_ranks(2)
def test_a_unit_that_backward_did_not_reach_ends_with_its_micro_batch_unless_it_stays(
    mesh: fs.Mesh, stays: bool, gathers: int
) -> None:
    units = {key: {"reshard_after_backward": not stays} for key in ("", "used", "unused")}
    both = Runs(lambda net, x: (net.used(x), net.unused(x)), used=nn.Linear(4, 4), unused=nn.Linear(4, 4))
    _, sharded, shards = of_module(mesh, both, units, strategy="shard_grad_op")
    evaluate = fs.accumulate(lambda shards, x: sharded(shards, {}, x)[0].sum(), 2)
    _, events = recorded(evaluate, shards, torch.ones(4, 4))
    units = [event.unit for event in events if event.kind == "all_gather"]
    assert units.count("unused") == units.count("used") == gathers


CHOICES_OF_NOTHING: dict[str, tuple[Any, Any, str]] = {  # tests/promises/test_options.py has more
    "no way": ({"2": "last"}, ValueError, r"reduce\['2'\] must be 'each', 'once' or 'shard_each'; found 'last'"),
    "no name": ({2: "once"}, TypeError, r"must map names or globs .*; found the key 2: write \{'blocks\.\*': 'once'\}"),
    "no unit": ({"3": "once"}, ValueError, r"must name units; found '3', which matches none of '', '0', '2', '4': write"),
}


@pytest.mark.parametrize("name", CHOICES_OF_NOTHING)
def test_a_choice_that_names_no_unit_or_no_way_is_an_error_before_anything_runs(name: str) -> None:
    plan, _, shards, loss_fn, _ = setup(fs.Mesh())
    reduce, kind, words = CHOICES_OF_NOTHING[name]
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
    for use in (
        lambda: fs.accumulate(loss_fn, 2, reduce=reduce)(shards, rows()),
        lambda: fs.predict_events(plan, accumulate=fs.Accumulation(2, reduce)),
        lambda: fs.make_train_step(lambda s, b, x: loss_fn(s, x), optimizer, plan, fs.Mesh(), accumulate=2, reduce=reduce),
    ):
        with pytest.raises(kind, match=words):
            use()


def test_shards_of_several_models_name_the_units_of_all() -> None:
    _, _, shards, loss_fn, _ = setup(fs.Mesh())
    both = lambda models, x: loss_fn(models[0]["teacher"], x) + loss_fn(models[1], x)  # noqa: E731
    models = [{"teacher": shards}, {name: tree.map(torch.clone, own) for name, own in shards.items()}]
    evaluate = fs.accumulate(both, 2, reduce={"4": "once"})
    _, (first, second) = evaluate(models, rows())
    torch.testing.assert_close(first["teacher"], second)
    with pytest.raises(ValueError, match="found '5', which matches none of"):
        fs.accumulate(both, 2, reduce={"5": "once"})(models, rows())


HOOKS: list[tuple[Any, Any, str]] = [
    ("log", TypeError, "a function of a unit's name, the key of a buffer and a 1-D tensor, or None; found 'l"),
    (lambda unit, key, partial: partial[:1], ValueError, r"unit '4' found a tensor of shape \(1,\) instead of"),
    (lambda unit, key, partial: 0.5, ValueError, "or a tensor of the shape that it got; .* found float"),
]


@pytest.mark.parametrize(("hook", "kind", "words"), HOOKS)
def test_a_hook_that_cannot_work_is_an_error(hook: Any, kind: Any, words: str) -> None:
    _, _, shards, loss_fn, _ = setup(fs.Mesh())
    with pytest.raises(kind, match=words):
        fs.value_and_grad(loss_fn, on_reduce_scattered=hook)(shards, rows())


@pytest.mark.parametrize(
    ("option", "value"),
    [("reduce='shard_each'", {"2": "shard_each"}), ("reduce='once'", "once"), ("on_reduce_scattered", id), ("on_grads", id)],
)
def test_shards_computed_inside_the_loss_are_refused(option: str, value: Any) -> None:
    _, _, shards, loss_fn, _ = setup(fs.Mesh())
    half = lambda shards, x: loss_fn({**shards, "2": tree.map(lambda s: s / 2, shards["2"])}, x)  # noqa: E731
    with pytest.raises(
        ValueError, match=rf"{option} needs shards that are gathered as they are; loss_fn computed the shard .* of unit '2'"
    ):
        fs.accumulate(half, 2, **{option.partition("=")[0]: value})(shards, rows())


def both_gradients(mesh: fs.Mesh) -> Any:
    plan, _, shards, loss_fn, mine = setup(mesh, torch.float32)
    _, grads = fs.accumulate(loss_fn, 2, reduce="shard_each")(shards, mine)
    module = net(dtype=torch.float32)
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in (*(module.get_submodule(name) for name in UNITS), module):
        fully_shard(part, mesh=devices)
    for number, micro in enumerate(mine.chunk(2)):
        module.set_requires_all_reduce(number == 1)
        (module(micro).square().mean() / 2).backward()
    return fs.gather(grads, plan, mesh), {name: p.grad.full_tensor() for name, p in module.named_parameters()}


@pytest.mark.slow
def test_on_processes_the_bits_are_those_of_fsdp2_with_set_requires_all_reduce() -> None:
    for ours, theirs in run_ranks(both_gradients, 4, shape=GRID):
        same_bits(ours, theirs)


# --- which gradients it holds, when it copies and frees them --------------------------------------


ALONE = Topology(Mesh(), False)
COMM = BufferComm(ALONE)


def two_leaves() -> list[torch.Tensor]:
    return [torch.ones(2), torch.ones(2)]


class Recorded(LocalGroup):
    """A group of two ranks, of which this process is one, that records when all-reduces start and are waited for."""

    order: list[str] = []  # noqa: RUF012
    size = 2  # type: ignore[assignment]

    def start(self, op):
        number = len(self.order)
        self.order.append(f"{number} starts")
        return DeferredWork(lambda: self.order.append(f"{number} is waited for"))


def test_a_reduction_is_over_before_the_next_takes_memory() -> None:
    order, comm = Recorded.order, BufferComm(Topology(Mesh({"shard": Recorded(size=2)}), False))
    with activate(GradReducer(two_leaves())) as reducer:
        for leaf in reducer.leaves:
            reducer.add(leaf, [torch.ones(2)], comm)
        assert order[:3] == ["0 starts", "0 is waited for", "2 starts"]
        reducer.post_backward()


def test_what_one_backward_did_not_bring_is_not_awaited_in_the_next() -> None:
    shards = two_leaves()
    reducer = GradReducer(shards, reduce="once")
    leaf = reducer.leaves[0]
    for forwards in (2, 1):  # the first backward leaves out one of two gradients
        reducer.accumulating = False
        for _ in range(forwards):
            leaf.awaited += 1
        reducer.add(leaf, [torch.ones(2)], COMM)
        assert (leaf.held is None) is (forwards == 1)
        reducer.post_backward()


STACKS = {  # options of the plan
    "cut": {},
    "copies": {"strategy": "no_shard"},
    "divided first": {"precision": fs.MixedPrecision(torch.float64, reduce_dtype=torch.float64, divide_before_reduce=True)},
}


@pytest.mark.parametrize("name", STACKS)
def test_the_reducer_takes_the_gradients_of_stacked_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are reduced while backward continues, and divided in place, as those of one model are."""
    taken: list[torch.Size] = []
    add = GradReducer.add
    monkeypatch.setattr(GradReducer, "add", lambda self, leaf, *rest: (taken.append(leaf.shape), add(self, leaf, *rest)))

    def main(mesh: fs.Mesh) -> None:
        _, _, shards, loss_fn, mine = setup(mesh, **STACKS[name])
        scales = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
        stack = tree.map(lambda leaf: leaf * scales[:, None], shards)
        losses_of = torch.vmap(loss_fn, in_dims=(0, None))
        weigh = lambda loss, x: (loss, float(mesh.rank))  # noqa: E731
        _, grads = fs.accumulate(lambda s, x: weigh(losses_of(s, x).sum(), x), MICRO, weighted=True)(stack, mine)
        for i, scale in enumerate(scales):
            model = tree.map(lambda leaf: leaf * scale, shards)  # noqa: B023
            _, expected = fs.accumulate(lambda s, x: weigh(loss_fn(s, x), x), MICRO, weighted=True)(model, mine)
            torch.testing.assert_close(tree.map(lambda leaf: leaf[i], grads), expected)  # noqa: B023

    fs.simulate(main, GRID)
    stacked = [shape for shape in taken if len(shape) == 2]
    assert len(stacked) == len(taken) // 4 > 0  # as often as those of three models, one after the other


@on_ranks(2)
def test_gradients_of_stacked_models_are_the_same_while_a_mode_records(mesh: fs.Mesh) -> None:
    _, _, shards, loss_fn, mine = setup(mesh)
    stack = tree.map(lambda leaf: torch.stack([leaf, 2 * leaf]), shards)
    losses_of = torch.vmap(loss_fn, in_dims=(0, None))
    evaluate = fs.value_and_grad(lambda s: losses_of(s, mine).sum())
    expected = evaluate(stack)
    with Alive(lambda nbytes: False):
        same_bits(evaluate(stack), expected)
