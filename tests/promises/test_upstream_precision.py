"""PyTorch's table of mixed precision: dtypes sent, computed in and kept, and the bits of plain torch.

The reference does not use this library. It is one copy of the model, cast as the precision says,
which runs on each rank's input. Its gradients are cast to the dtype of the reduction, and added in
the order of ranks.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import run_ranks, run_simulated
from tests.storages import Log, LoggedBlock

STEPS = 2
WIDTH = 5  # a weight of 25 elements, so that two ranks need padding
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PRECISIONS = {
    "all fp16": fs.MixedPrecision(FP16, FP16, FP16),
    "reduction fp16": fs.MixedPrecision(reduce_dtype=FP16),
    "parameters and buffers fp16": fs.MixedPrecision(FP16, buffer_dtype=FP16),
    "none": fs.MixedPrecision(),
    "parameters fp16, buffers bf16, reduction fp32": fs.MixedPrecision(FP16, FP32, BF16),
}
MORE = {"all bf16": fs.MixedPrecision(BF16, BF16, BF16), "parameters bf16, reduction fp32": fs.MixedPrecision(BF16, FP32)}
# The first step overflows in float16, and the second does not.
SCALER = {"init_scale": 2.0**17, "backoff_factor": 2.0**-6, "growth_interval": 1}
WAYS = list(itertools.product((False, True), (False, True), (None, "pre", "post")))  # offload, forward, backward prefetch


class Noted(list):
    """Notes that modules make; ``deepcopy`` of a module keeps the same list."""

    def __deepcopy__(self, memo: Any) -> Noted:
        return self


class Checked(nn.Module):
    """A linear layer and a buffer of float64; forward notes their dtypes."""

    def __init__(self, noted: Noted, number: int) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, bias=False)
        self.name, self.noted = f"buffer{number}", noted
        self.register_buffer(self.name, torch.randn(1, 2, dtype=FP64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.lin(x)
        self.noted.append((x.dtype, self.lin.weight.dtype, getattr(self, self.name).dtype, out.dtype))
        return out


def build(layers: int, full: torch.dtype) -> tuple[nn.Module, Noted, list[str]]:
    """Return a model, its notes, and its units: every layer except the last, which the root owns."""
    torch.manual_seed(7)
    noted = Noted()
    net = nn.Sequential(*(Checked(noted, i) for i in range(layers)))
    for layer in net:
        layer.lin.to(full)
    return net, noted, [str(i) for i in range(layers - 1)]


def batch_of(step: int, rank: int, full: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, dtype=full, generator=generator)


def in_plain_torch(
    precision: fs.MixedPrecision, full: torch.dtype, scaled: bool, layers: int, ranks: int
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Train an unsharded model in the same precision under ``torch.amp.GradScaler``; return losses, params and scales."""
    net, _, _ = build(layers, full)
    weights = [layer.lin.weight for layer in net]
    compute = precision.param_dtype or full
    optimizer = torch.optim.Adam(weights, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", **SCALER, enabled=scaled)
    losses, scales = [], []
    for step in range(STEPS):
        total, sums = torch.zeros(()), [torch.zeros(())] * layers
        for rank in range(ranks):
            local = [weight.detach().to(compute).requires_grad_() for weight in weights]
            x = batch_of(step, rank, full)
            x = x if precision.param_dtype is None else x.to(precision.param_dtype)
            for weight in local:
                x = nn.functional.linear(x, weight)
            loss = scaler.scale(x.sum())
            grads = [grad.to(precision.reduce_dtype or compute) for grad in torch.autograd.grad(loss, local)]
            sums = grads if rank == 0 else [a + b for a, b in zip(sums, grads, strict=True)]
            wide = torch.promote_types(loss.dtype, torch.float32)  # metrics are at least float32
            value = loss.detach().to(wide) / scaler.get_scale()
            total = value if rank == 0 else total + value
        for weight, grad in zip(weights, sums, strict=True):
            weight.grad = grad.to(full) / ranks
        losses.append((total / ranks).item())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return losses, {name: value.detach() for name, value in net.named_parameters()}, scales


def check_way(
    mesh: fs.Mesh,
    model: Any,
    precision: fs.MixedPrecision,
    full: torch.dtype,
    scaled: bool,
    strategy: str,
    layers: int,
    way: tuple[bool, bool, str | None],
    expected: Any,
) -> None:
    """Train in one way, and assert everything that upstream's test asserts."""
    offload, forward, backward = way
    noted, units, (apply, params, buffers) = model
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy, offload=offload, precision=precision)
    schedule = fs.make_schedule(plan, forward_prefetch=forward, backward_prefetch=backward)
    sharded = fs.fully_shard(apply, plan, mesh, schedule=schedule)
    scaler = fs.GradScaler(**SCALER) if scaled else None
    grad_dtypes = set()

    def loss_fn(shards: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return sharded(shards, buffers, x.clone().requires_grad_()).sum()

    adam = fs.torch_optimizer(torch.optim.Adam, lr=0.01)

    def update(grads: Any, state: Any, params: Any) -> Any:
        grad_dtypes.update(grad.dtype for unit in grads.values() for grad in unit.values())
        return adam.step(grads, state, params)

    step = fs.make_train_step(loss_fn, adam._replace(step=update), plan, mesh, scaler=scaler)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    compute = precision.param_dtype or full
    reduced = precision.reduce_dtype or compute
    losses, scales = [], []
    for number in range(STEPS):
        with fs.record_events() as events:
            state, metrics = step(state, batch_of(number, mesh.rank, full))
        predicted = fs.predict_events(plan, schedule)
        of_units = [event for event in events if event.unit is not None]
        assert tuple(of_units) == predicted
        for dtype, gathers in ((compute, True), (reduced, False)):
            assert {e.dtype for e in of_units if (e.kind == "all_gather") == gathers} <= {str(dtype).removeprefix("torch.")}
        assert len([event for event in of_units if event.kind != "all_gather"]) == (layers if mesh.world_size > 1 else 0)
        # one number of the scaler and one of the loss
        loss_dtype = str(metrics["loss"].dtype).removeprefix("torch.")
        besides = ["float32"] * scaled + [loss_dtype]
        rest = [event for event in events if event.unit is None]
        assert [(event.kind, event.dtype) for event in rest] == [("all_reduce", dtype) for dtype in besides] * bool(
            predicted
        )
        assert len(set(noted)) == 1
        assert noted.pop() == (compute, compute, precision.buffer_dtype or FP64, compute)
        noted.clear()
        losses.append(metrics["loss"].item())
        scales.append(state.scaler.scale.item() if scaled else 1.0)
    assert grad_dtypes == {full}
    kept = [leaf for leaf in _tensors((state.shards, state.opt_state)) if leaf.ndim]
    assert {leaf.dtype for leaf in kept} == {full}
    assert len(kept) == 3 * layers  # the shards and Adam's two averages
    assert state.buffers.keys() == before.keys()
    assert all(torch.equal(state.buffers[key], value) and value.dtype == FP64 for key, value in before.items())
    assert all(torch.equal(buffers[key], value) for key, value in before.items())
    wanted_losses, wanted, wanted_scales = expected
    assert losses == wanted_losses
    assert scales == wanted_scales
    found = fs.gather(state.shards, plan, mesh)
    assert all(found[key].dtype == full and torch.equal(found[key], value) for key, value in wanted.items())
    assert not any(torch.equal(found[key], value) for key, value in params.items())


def check_ways(mesh: fs.Mesh, named: str, full: torch.dtype, scaled: bool, strategies: Any, ways: Any, layers: Any) -> None:
    precision = {**PRECISIONS, **MORE}[named]
    for depth in layers:
        expected = in_plain_torch(precision, full, scaled, depth, mesh.world_size)
        net, noted, units = build(depth, full)
        model = (noted, units, fs.make_functional(net))
        for strategy, way in itertools.product(strategies, ways):
            try:
                check_way(mesh, model, precision, full, scaled, strategy, depth, way, expected)
            except Exception as error:
                error.add_note(f"{named}, {full}, {strategy}, {depth} layers, offload, forward and backward prefetch: {way}")
                raise


def _tensors(x: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree.leaves(x) if isinstance(leaf, torch.Tensor)]


TABLE = [
    pytest.param(named, full, scaled, id=f"{named}, {'fp32' if full is FP32 else 'fp64'}{', scaler' * scaled}")
    for named, full, scaled in itertools.product(PRECISIONS, (FP32, FP64), (False, True))
]


@pytest.mark.nightly(one_in=12)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("named", "full", "scaled"), TABLE)
def test_every_way_moves_the_dtypes_of_its_precision_and_equals_plain_torch(named, full, scaled, strategy):
    # Each case takes every third way, so that each way meets each precision. A unit of no_shard is not gathered, so
    # a schedule changes nothing there.
    first = (list(PRECISIONS).index(named) + STRATEGIES.index(strategy) + 2 * scaled + (full is FP64)) % 3
    ways = WAYS[first::3] if strategy != "no_shard" else [way for way in WAYS if way[1:] == (True, "pre")]
    run_simulated(check_ways, 2, named, full, scaled, (strategy,), ways, (3,))


FEW_WAYS = ((False, True, "pre"), (True, False, "post"))


def check_all(mesh: fs.Mesh) -> None:
    for named in {**PRECISIONS, **MORE}:
        for full, scaled, ways in ((FP32, True, FEW_WAYS[:1]), (FP64, False, FEW_WAYS[1:])):
            check_ways(mesh, named, full, scaled, STRATEGIES, ways, (1, 3))


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_on_processes_every_precision_equals_plain_torch(world_size):
    run_ranks(check_all, world_size, timeout=120)


@pytest.mark.nightly
def test_ranks_that_simulate_more_add_up_in_their_order():
    run_simulated(check_ways, 3, "all fp16", FP32, True, STRATEGIES, FEW_WAYS, (3,))
    run_simulated(check_ways, 3, "all bf16", FP32, False, STRATEGIES, FEW_WAYS, (3,))


# --- memory between forward and backward, and gradients in low precision ---------------------------------------------------


# The number of units whose cast copies are in memory between forward and backward. The root, whose
# copy is kept until its backward, is not counted.
KEPT = {"full_shard": 0, "shard_grad_op": 2, "no_shard": 2}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_cast_copy_lives_as_long_as_a_gathered_one(strategy, world_size):
    def main(mesh: fs.Mesh) -> None:
        log = Log()
        apply, params, buffers = fs.make_functional(nn.Sequential(*(LoggedBlock(WIDTH, log) for _ in range(3))))
        plan = fs.make_plan(params, mesh, units=["0", "1"], strategy=strategy, precision=fs.MixedPrecision(FP16))
        sharded = fs.fully_shard(apply, plan, mesh)
        alive = []

        def loss_fn(shards: Any) -> torch.Tensor:
            loss = sharded(shards, buffers, torch.ones(2, WIDTH, requires_grad=True)).sum()
            alive.append(log.alive())
            return loss

        fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))
        assert (alive, log.alive()) == ([1 + KEPT[strategy]], 0)

    run_simulated(main, world_size)


def low_gradients(mesh: fs.Mesh, offload: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    apply, params, buffers = fs.make_functional(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)))
    found = []
    for keep in (True, False):
        precision = fs.MixedPrecision(dtype, dtype, dtype, keep_low_precision_grads=keep)
        plan = fs.make_plan(params, mesh, units=["0"], precision=precision, offload=offload)
        sharded = fs.fully_shard(apply, plan, mesh)

        def loss_fn(shards: Any, buffers: Any, x: torch.Tensor, sharded: Any = sharded) -> torch.Tensor:
            return sharded(shards, buffers, x).sum()

        step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), plan, mesh)
        state = step.init(fs.shard(params, plan, mesh), buffers)
        for _ in range(3):
            _, grads = fs.value_and_grad(loss_fn)(state.shards, buffers, torch.ones(1, 10))
            leaves = [grad for unit in grads.values() for grad in unit.values()]
            assert {grad.dtype for grad in leaves} == {dtype if keep else FP32}
            state, _ = step(state, torch.ones(1, 10))
        assert {leaf.dtype for leaf in _tensors((state.shards, state.opt_state))} == {FP32}
        found.append(fs.gather(state.shards, plan, mesh))
    kept, widened = found
    # With two ranks the mean divides by two, which is exact in every precision.
    assert all(torch.equal(kept[key], value) and not torch.equal(params[key], value) for key, value in widened.items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_gradients_stay_in_low_precision_on_request_and_optimizers_take_them(offload, dtype):
    for world_size in (1, 2):
        run_simulated(low_gradients, world_size, offload, dtype)


@pytest.mark.parametrize(
    "precision", [fs.MixedPrecision(FP16, FP32), fs.MixedPrecision(reduce_dtype=FP16)], ids=["fp32", "fp16"]
)
def test_gradients_add_up_in_the_dtype_of_the_reduction_under_plain_autograd_and_over_micro_batches(precision):
    apply, params, buffers = fs.make_functional(nn.Linear(WIDTH, WIDTH, bias=False))

    def gradient(rank: int, number: int) -> torch.Tensor:
        local = params["weight"].detach().to(precision.param_dtype or FP32).requires_grad_()
        loss = nn.functional.linear(batch_of(number, rank, FP32).to(local.dtype), local).square().sum() * 0.5
        return torch.autograd.grad(loss, local)[0].to(precision.reduce_dtype)

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(params, mesh, precision=precision)
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        whole = lambda grad: fs.gather({"": {"float32": grad}}, plan, mesh)["weight"]  # noqa: E731
        loss_fn = lambda shards, x: sharded(shards, buffers, x).square().sum()  # noqa: E731
        both = [batch_of(number, mesh.rank, FP32) for number in range(2)]
        _, grads = fs.accumulate(loss_fn, 2, reduce="once")(shards, torch.cat(both))
        own = [gradient(rank, 0) + gradient(rank, 1) for rank in range(2)]
        assert torch.equal(whole(grads[""]["float32"]), (own[0] + own[1]).float() / 2)
        leaf = shards[""]["float32"].requires_grad_()
        (loss_fn(shards, both[0]) * 0.5).backward()
        assert torch.equal(whole(leaf.grad), (gradient(0, 0) + gradient(1, 0)).float())  # the sum over ranks

    run_simulated(main, 2)
