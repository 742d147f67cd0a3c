"""Loss scaling: scales are those of torch.amp.GradScaler; promises/test_upstream_precision.py has the skips."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import of_module
from tests.ranks import on_ranks

INF = float("inf")
SCALER = fs.GradScaler(64.0)


def batch(rank: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)), "factor": torch.ones(8)}


def loss_of(out: torch.Tensor, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    return out.float().square().mean() * rows["factor"].mean()


def scaled(
    mesh: fs.Mesh,
    net: nn.Module,
    loss_fn: Any = loss_of,
    scaler: Any = SCALER,
    plan: Any = None,
    **options: Any,
) -> tuple[Any, fs.TrainState]:
    """Return a training step of a module, and its first state."""
    functional = fs.make_functional(net, mutable=options.get("mutable", False))
    planned, sharded, shards = of_module(mesh, functional, **plan or {})
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    step = fs.make_train_step(
        lambda shards, buffers, rows: loss_fn(sharded(shards, buffers, rows["x"]), rows),
        optimizer, planned, mesh, scaler=scaler, **options,
    )  # fmt: skip
    return step, step.init(shards, functional[2])


@on_ranks(2)
def test_a_skipped_step_has_new_buffers_and_the_aux(mesh: fs.Mesh) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    expected, rows = copy.deepcopy(net), {**batch(0), "factor": torch.tensor([INF])}
    expected(rows["x"])
    loss_fn = lambda out, rows: (loss_of(out[0], rows), out[1], {"rows": len(rows["x"])})  # noqa: E731
    step, state = scaled(mesh, net, loss_fn, mutable=True, has_aux=True, plan={"units": ["0", "1", "2"]})
    state, metrics = step(state, rows)
    assert metrics["found_inf"]
    assert metrics["aux"] == {"rows": 8}
    torch.testing.assert_close(state.buffers, dict(expected.named_buffers()), rtol=0, atol=0)


@on_ranks(2)
def test_on_grads_sees_scaled_gradients(mesh: fs.Mesh) -> None:
    net = nn.Linear(4, 1)
    seen: list[dict[str, torch.Tensor]] = []
    keep = lambda unit, grads: seen.append(tree.map(torch.clone, grads))  # noqa: E731
    for scaler in (SCALER, None):
        step, state = scaled(mesh, net, scaler=scaler, on_grads=keep)
        step(state, batch(mesh.rank))
    with_scale, without = seen
    assert sorted(without) == ["bias", "weight"]
    torch.testing.assert_close(with_scale, tree.map(lambda grad: grad * 64, without), rtol=0, atol=0)


@pytest.mark.parametrize("scaler", [fs.GradScaler(64.0, growth_interval=1), None], ids=["scaled", "plain"])
@on_ranks(2)
def test_a_step_without_data_leaves_the_state_as_it_was(mesh: fs.Mesh, scaler: Any) -> None:
    step, state = scaled(mesh, nn.Linear(4, 1), lambda out, rows: (loss_of(out, rows), 0), scaler, weighted=True)
    after, metrics = step(state, {"x": torch.full((2, 4), INF), "factor": torch.ones(2)})
    assert (metrics["weight"], metrics.get("found_inf", 0)) == (0, 0)  # a batch of weight zero has no infinities
    assert after is state


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.floats(1.01, 100),
    st.floats(0.01, 0.99),
    st.integers(1, 4),
    st.floats(2.0**-40, 2.0**127, width=32),  # so that no scale shrinks to the smallest one, see below
)
def test_scales_are_torchs_to_the_bit(script: list[bool], growth: float, backoff: float, interval: int, init: float) -> None:
    scaler = fs.GradScaler(init, growth, backoff, interval)
    state = scaler.init(fs.Mesh())
    scale, tracker = torch.tensor(init), torch.zeros((), dtype=torch.int32)
    for bad in script:
        state = scaler.update(state, torch.tensor(bad))
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(bad)), growth, backoff, interval)
        assert torch.equal(state.scale, scale)
        assert torch.equal(state.growth_tracker, tracker)
    assert state.scale.dtype == torch.float32
    assert state.growth_tracker.dtype == torch.int32


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


@pytest.mark.parametrize("bad", [None, INF, float("nan")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unscaling_is_torchs_in_place_where_gradients_are_donated(dtype: torch.dtype, bad: float | None) -> None:
    scaler, mesh = fs.GradScaler(3.0), fs.Mesh()
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
    if bad is not None:
        values[7] = bad
    before, given, state = values.clone(), values.clone(), scaler.init(mesh)
    memory = given.data_ptr()
    kept, found = scaler.unscale({"w": values, "frozen": None}, state, mesh)
    new, found_again = scaler.unscale({"w": given, "frozen": None}, state, mesh, donate=True)
    assert bool(found) == bool(found_again) == (bad is not None)
    wanted = before.to(torch.promote_types(dtype, torch.float32), copy=True)
    inverse = torch.tensor(3.0).double().reciprocal().float()
    if dtype.is_complex:
        torch.view_as_real(wanted).mul_(inverse)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_([wanted], torch.zeros(()), inverse)
    for each in (kept, new):
        torch.testing.assert_close(each, {"w": wanted, "frozen": None}, rtol=0, atol=0, equal_nan=True)
    assert (new["w"].data_ptr() == memory) == (dtype.itemsize >= 4)
    with pytest.raises(RuntimeError, match="was donated to a training step"):
        given.sum()
    torch.testing.assert_close(values, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [INF, -INF, float("nan")], ids=str)
@pytest.mark.parametrize("world", [1, 3, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}], ids=str)
@on_ranks()
def test_an_infinity_on_one_rank_is_found_on_every_rank(mesh: fs.Mesh, world: Any, value: float) -> None:
    scaler = fs.GradScaler()
    for rank in range(mesh.world_size + 1):
        grads = {"a": {"float16": torch.ones(3).half()}, "b": {"float64": torch.ones(2).double()}}
        if rank == mesh.rank:
            grads["a"]["float16"][1] = value
        assert scaler.unscale(grads, scaler.init(mesh), mesh)[1] == (rank < mesh.world_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_loss_is_scaled_in_float32_or_wider(dtype: torch.dtype) -> None:
    scaler = fs.GradScaler(2.0**20)
    loss = torch.tensor(0.5, dtype=dtype, requires_grad=True)
    scaled = scaler.scale(loss, scaler.init(fs.Mesh()))
    assert scaled.item() == 2.0**19
    assert scaled.dtype == torch.promote_types(dtype, torch.float32)


def test_a_scale_never_shrinks_to_zero() -> None:
    # torch's does, after some 150 bad steps in a row; zero hides infinities and makes every gradient NaN.
    scaler, mesh = fs.GradScaler(8.0), fs.Mesh()
    state = scaler.init(mesh)
    for _ in range(200):
        state = scaler.update(state, torch.tensor(True))
    assert state.scale == torch.finfo(torch.float32).tiny
    loss = scaler.scale(torch.tensor(1.0, requires_grad=True), state)
    grads, found_inf = scaler.unscale({"w": loss.detach()}, state, mesh)
    assert grads["w"] == 1.0
    assert not found_inf


@pytest.mark.parametrize("scale", [0.0, INF, float("nan")], ids=str)
def test_a_scale_without_a_reciprocal_counts_as_an_infinity(scale: float) -> None:
    state = fs.ScalerState(torch.tensor(scale), torch.zeros((), dtype=torch.int32))
    _, found_inf = fs.GradScaler().unscale({"w": torch.zeros(2) * scale}, state, fs.Mesh())
    assert found_inf


def test_gradients_with_a_graph_are_unscaled_differentiably() -> None:
    scaler, mesh = fs.GradScaler(init_scale=8.0), fs.Mesh()
    x = torch.ones(3, requires_grad=True)
    grads, found = scaler.unscale({"w": x * 2}, scaler.init(mesh), mesh)
    assert not found
    assert torch.equal(torch.autograd.grad(grads["w"].sum(), x)[0], torch.full((3,), 0.25))


# world, options, and whether the gradients are the step's own
OWNED: dict[str, tuple[int, dict[str, Any], bool]] = {
    "two ranks": (2, {}, True),
    "alone": (1, {}, False),
    "without scaling": (1, {"scaler": None}, False),
    "hook": (2, {"on_grads": lambda unit, grads: None}, False),
    "divisor": (2, {"divisor": 1.0}, False),
    "local": (2, {"local": ["w"]}, False),
}


@pytest.mark.parametrize(("world", "options", "owned"), OWNED.values(), ids=OWNED)
@on_ranks()
def test_a_step_unscales_and_clips_in_place_only_where_the_gradients_are_its_own(
    mesh: fs.Mesh, world: int, options: dict[str, Any], owned: bool
) -> None:
    """A backward of the user's own returns one tensor as gradient each time; no step may change it."""
    constant, params = torch.full((4,), 3.0), {"w": torch.ones(4)}

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return constant

    rest = {"scaler": fs.GradScaler(8.0), **options}
    plan = fs.make_plan(params, mesh, strategy="no_shard", local=rest.pop("local", ()))
    loss_fn = lambda shards, buffers, batch: Constant.apply(*shards[""].values())  # type: ignore[no-untyped-call] # noqa: E731
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD), plan, mesh, max_norm=0.1, **rest)
    step(step.init(fs.shard(params, plan, mesh), {}), None)
    assert torch.equal(constant, torch.full((4,), 3.0))
    assert step.owns_grads == owned
