"""accumulate: one gradient of many micro-batches, reduced for each of them or once."""

from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import run_simulated

REDUCE = ["each", "once"]
ROWS, MICRO = 24, 3


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)]
    made = nn.Sequential(*layers).double()
    made[2].bias.requires_grad_(False)
    return made


def batch() -> torch.Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def setup(mesh: fs.Mesh, strategy: Any = "full_shard", **options: Any) -> Any:
    apply, params, buffers = fs.make_functional(net())
    plan = fs.make_plan(params, mesh, units=["2", "4"], strategy=strategy, **options)
    sharded = fs.fully_shard(apply, plan, mesh)
    loss_fn = lambda shards, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
    return sharded, plan, fs.shard(params, plan, mesh), loss_fn


def test_once_reduces_a_checkpointed_unit_as_soon_as_its_gradient_is_whole() -> None:
    params = {"a": torch.linspace(1, 2, 5), "b": torch.linspace(3, 4, 5)}

    def main(mesh: fs.Mesh) -> list:
        plan = fs.make_plan(params, mesh, units=["a", "b"])
        f = {n: fs.reshard(fs.unshard(lambda w, x: w * w * x, plan.units[n], mesh)) for n in params}

        def loss_fn(s: Any, x: torch.Tensor) -> torch.Tensor:
            for name in params:
                x = torch.utils.checkpoint.checkpoint(f[name], s[name], x, use_reentrant=False)
            return x.sum()

        with fs.record_events() as events:
            fs.accumulate(loss_fn, 2, reduce="once")(fs.shard(params, plan, mesh), torch.ones(2, 1))
        return [(event.kind, event.unit) for event in events]

    for events in fs.simulate(main, 2):
        assert [event for event in events if event[0] != "all_gather"] == [("reduce_scatter", "b"), ("reduce_scatter", "a")]
        last_gather = len(events) - 1 - events[::-1].index(("all_gather", "a"))
        assert events.index(("reduce_scatter", "b")) < last_gather


def test_once_hands_on_grads_the_sum_over_micro_batches_once_a_unit() -> None:
    seen: dict[int, list] = {0: [], 1: []}

    def main(mesh: fs.Mesh) -> None:
        _, _plan, shards, loss_fn = setup(mesh)
        note = lambda unit, grads: seen[mesh.rank].append((unit, tree.map(torch.clone, grads)))  # noqa: E731
        mine = batch().chunk(2)[mesh.rank]
        fs.accumulate(loss_fn, MICRO, reduce="once", on_grads=note)(shards, mine)
        model = net()
        model(mine).square().mean().backward()
        for _, grads in seen[mesh.rank]:
            for path, grad in grads.items():
                torch.testing.assert_close(grad, model.get_parameter(path).grad)

    fs.simulate(main, 2)
    assert [[unit for unit, _ in calls] for calls in seen.values()] == [["4", "2", ""]] * 2


EVALUATE = fs.accumulate(lambda shards, x: x.sum(), 2)


@pytest.mark.parametrize(
    ("batch", "words"),
    {
        "not a multiple": (torch.ones(3), r"must be a multiple of the 2 micro-batches; found 3: choose a divisor, or pad"),
        "empty": (torch.ones(0), "must be a multiple of the 2 micro-batches; found 0"),
        "sizes that differ": ([torch.ones(2), torch.ones(4)], r"one size of dim 0.*found \['2', '4'\]: pass what is not"),
        "a scalar": (torch.ones(()), r"one size of dim 0.*found \['Tensor'\]"),
        "no tensor": ({"x": torch.ones(2), "k": 3}, r"one size of dim 0.*found \['2', 'int'\]"),
        "nothing": ({}, "one size of dim 0.*found no leaves"),
    }.values(),
    ids=["not a multiple", "empty", "sizes that differ", "a scalar", "no tensor", "nothing"],
)
def test_a_batch_that_cannot_be_split_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EVALUATE({"": {"float32": torch.ones(2)}}, batch)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"micro_batches": 0}, "micro_batches must be a whole number of micro-batches, at least 1; found 0: pass 1 for"),
        ({"micro_batches": 2.0}, r"micro_batches must be a whole number of micro-batches, at least 1; found 2\.0: pass 2"),
        ({"micro_batches": 2, "reduce": "last"}, "reduce must be 'each', 'once' or 'shard_each'; found 'last'"),
    ],
    ids=str,
)
def test_what_does_not_say_how_to_accumulate_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fs.accumulate(lambda shards, x: x, **arguments)
    with pytest.raises(ValueError, match=words):
        fs.predict_events(fs.make_plan({"w": torch.ones(2)}, 2), **arguments)


def test_a_call_without_a_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="the batch as its last positional argument"):
        EVALUATE({"": {}})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_mean_of_losses_of_low_precision_is_in_float32(dtype: torch.dtype) -> None:
    def main(mesh: fs.Mesh) -> None:
        _, _, shards, loss_fn = setup(mesh)
        low = lambda shards, x: loss_fn(shards, x).to(dtype)  # noqa: E731
        losses = [low(shards, part).double() for part in batch().chunk(8)]
        wide = torch.promote_types(dtype, torch.float32)
        loss, _ = fs.accumulate(low, 8)(shards, batch())
        assert loss.dtype == wide
        torch.testing.assert_close(loss.double(), torch.stack(losses).mean(), rtol=2e-7, atol=0)
        one, _ = fs.value_and_grad(low)(shards, batch())
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), low(shards, batch()).double(), rtol=0, atol=0)

    run_simulated(main, 2)


@pytest.mark.parametrize("reduce", REDUCE)
def test_an_iterator_gives_micro_batches_one_by_one_with_the_same_bits(reduce: str) -> None:
    def main(mesh: fs.Mesh) -> None:
        _, _, shards, loss_fn = setup(mesh)
        mine, seen = batch().chunk(2)[mesh.rank], []

        def stream() -> Any:
            for number, part in enumerate(mine.chunk(MICRO)):
                seen.append(f"batch {number}")
                yield part

        def noted(shards: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append("forward")
            return loss_fn(shards, x)

        loss, grads = fs.accumulate(loss_fn, MICRO, reduce=reduce)(shards, mine)
        streamed, found = fs.accumulate(noted, MICRO, reduce=reduce)(shards, stream())
        assert torch.equal(loss, streamed)
        assert tree.paths(grads) == tree.paths(found)
        assert all(torch.equal(one, other) for one, other in zip(tree.leaves(grads), tree.leaves(found), strict=True))
        assert seen == [f for number in range(MICRO) for f in (f"batch {number}", "forward")]

    run_simulated(main, 2)


def test_a_call_takes_its_micro_batches_from_an_iterator_and_leaves_the_rest() -> None:
    def main(mesh: fs.Mesh) -> None:
        _, _, shards, loss_fn = setup(mesh)
        parts = iter(batch().split(3))  # eight micro-batches, also of unequal sizes
        evaluate = fs.accumulate(loss_fn, 3)
        first = evaluate(shards, parts)[0]
        second = evaluate(shards, parts)[0]
        torch.testing.assert_close(first, evaluate(shards, batch()[:9])[0])
        torch.testing.assert_close(second, evaluate(shards, batch()[9:18])[0])
        with pytest.raises(
            ValueError, match=r"must hold the 3 micro-batches of every call, on every rank; found 2: leave out"
        ):
            evaluate(shards, parts)

    run_simulated(main, 1)


def test_a_trace_takes_no_iterator() -> None:
    net = nn.Linear(3, 1)
    apply, params, buffers = fs.make_functional(net)

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(params, mesh)
        sharded = fs.fully_shard(apply, plan, mesh)
        loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
        step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh, accumulate=2)
        state = step.init(fs.shard(params, plan, mesh), buffers)
        with pytest.raises(ValueError, match=r"cannot ask an iterator for micro-batches"):
            fs.trace(step, state, iter([torch.ones(2, 3)] * 2))
        after, metrics = step(state, iter([torch.ones(2, 3), torch.zeros(2, 3)]))
        assert after.step == 1
        assert metrics["loss"].isfinite()

    run_simulated(main, 1)
