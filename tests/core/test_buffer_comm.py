"""Casts around collectives as linear maps, and a Cast in place of the cast to param_dtype."""

import functools
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import by_hand, forward_mode, mlp, of_module, of_precision_page, recorded, same_bits
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_ranks, run_simulated

pytestmark = forward_mode
HYBRID = {"replicate": 2, "shard": 2}


def whole_numbers(seed: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers whose sums and products are exact in every dtype of this file."""
    return torch.randint(-64, 65, (n,), generator=torch.Generator().manual_seed(seed)).to(dtype)


@crossed(keeps={"dtype of the shard": False, "kept": True}, strategy=["full_shard", "no_shard"], world=[1, 2, 3, HYBRID])
@on_ranks()
def test_the_backward_of_each_is_the_other_any_number_of_times(
    mesh: fs.Mesh, world: Any, strategy: str, keeps: bool
) -> None:
    """Parameters of float64 are gathered in float32, and their gradients reduced in float64."""
    precision = fs.MixedPrecision(torch.float32, reduce_dtype=torch.float64, keep_low_precision_grads=keeps)
    cut = mesh.shard.size if strategy == "full_shard" else 1
    part, first = mesh.shard.rank % cut, mesh.rank - mesh.shard.rank % cut
    params = {"w": whole_numbers(0, 5 * cut, torch.float64)}
    _, f, shards = by_hand(mesh, params, lambda p: p["w"] * 1, precision=precision, strategy=strategy)
    x = shards[""]["float64"].requires_grad_()
    y = whole_numbers(100 + mesh.rank, 5 * cut, torch.float32).requires_grad_()
    v = [whole_numbers(200 + rank, 5, torch.float64) for rank in range(mesh.world_size)]
    (gx,) = torch.autograd.grad(f({"float64": x}), x, y, create_graph=True)
    total = sum(whole_numbers(100 + rank, 5 * cut, torch.float64) for rank in range(mesh.world_size))
    assert gx.dtype == torch.float64
    assert torch.equal(gx, total.chunk(cut)[part])
    (gy,) = torch.autograd.grad(gx, y, v[mesh.rank])  # the adjoint of the adjoint
    assert gy.dtype == torch.float32
    assert torch.equal(gy, torch.cat(v[first : first + cut]).float())


W = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
X = torch.linspace(-1, 2, 8).reshape(2, 4)


@pytest.mark.slow
@crossed(
    strategy=["full_shard", "no_shard"],
    keep={"widened": False, "kept": True},
    reduce=[None, torch.bfloat16, torch.float32, torch.float64],
    world=[1, 2],
)
@on_ranks()
def test_gradients_have_the_dtype_that_the_page_says(
    mesh: fs.Mesh, world: int, reduce: Any, keep: bool, strategy: str
) -> None:
    precision = fs.MixedPrecision(torch.float16, reduce, keep_low_precision_grads=keep)
    kept = (reduce or torch.float16) if keep else torch.float64
    square = lambda leaves, x: (x @ leaves["w"]).square().mean()  # noqa: E731
    plan, f, shards = by_hand(mesh, {"w": W}, square, precision=precision, strategy=strategy)
    x, loss_fn = X.half(), lambda s, x: f(s[""], x)
    _, wanted = fs.value_and_grad(loss_fn)(shards, x)
    for evaluate in (
        fs.value_and_grad(loss_fn),
        fs.accumulate(loss_fn, 2),
        fs.accumulate(loss_fn, 2, reduce="once"),
        fs.value_and_grad(lambda s, x: (loss_fn(s, x), 2.0), weighted=True),
    ):
        _, grads = evaluate(shards, x)
        assert grads[""]["float64"].dtype == kept
        whole = fs.gather(grads, plan, mesh)["w"]
        assert whole.dtype == torch.float64
        torch.testing.assert_close(whole, fs.gather(wanted, plan, mesh)["w"], rtol=2e-2, atol=1e-2)
        clipped, norm = fs.clip_by_global_norm(grads, plan, mesh, 0.5)
        torch.testing.assert_close(norm, whole.norm().to(torch.promote_types(kept, torch.float32)))
        assert clipped[""]["float64"].dtype == kept
    local = shards[""]["float64"].clone().requires_grad_()
    (plain,) = torch.autograd.grad(f({"float64": local}, x), local)
    assert plain.dtype == torch.func.grad(lambda s: f({"float64": s}, x))(local.detach()).dtype == torch.float64


@on_ranks(2)
def test_complex_and_integer_leaves_stay_as_they_are(mesh: fs.Mesh) -> None:
    params = {"w": torch.ones(3), "z": torch.tensor([1 + 2j, 3 - 1j, 0.5j]), "i": torch.tensor([1, 2, 3])}
    precision = fs.MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)

    def apply(leaves: Any) -> torch.Tensor:
        assert [leaves[key].dtype for key in "wzi"] == [torch.bfloat16, torch.complex64, torch.int64]
        return (leaves["w"].float() * leaves["z"].abs() * leaves["i"]).sum()

    plan, f, shards = by_hand(mesh, params, apply, precision=precision)
    (_, grads), events = recorded(fs.value_and_grad(lambda s: f(s[""])), shards)
    assert events == fs.predict_events(plan)
    dtypes = {key: None if grad is None else grad.dtype for key, grad in grads[""].items()}
    assert dtypes == {"float32": torch.bfloat16, "complex64": torch.complex64, "int64.frozen": None}
    assert {e.dtype for e in events if e.kind != "all_gather"} == {"bfloat16", "complex64"}
    back = fs.gather(shards, plan, mesh)
    assert all(torch.equal(back[key], value) for key, value in params.items())


# --- a Cast ---------------------------------------------------------------------------------------


PAGE = of_precision_page("BLOCK = 64\n")
quantise, blocks_of, eight_bits = (PAGE[name] for name in ("quantise", "blocks_of", "eight_bits"))
NAMES = ["0", "2"]
model = functools.partial(mlp, 5, 17, 9, 3, dtype=torch.float32)


def rounded(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return a whole flat buffer after each rank has quantised its slice."""
    parts = x.chunk(ranks)
    return torch.cat([blocks_of(part.numel())(quantise(part).view(1, -1)) for part in parts])


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


OPTIONS = {name: {"strategy": name} for name in ("full_shard", "shard_grad_op", "no_shard")} | {"offload": {"offload": True}}
AHEAD = {
    "on demand": {"forward_prefetch": False, "backward_prefetch": None},
    "before": {"forward_prefetch": True, "backward_prefetch": "pre"},
    "after": {"forward_prefetch": True, "backward_prefetch": "post"},
}


def gradient(mesh: fs.Mesh, options: dict[str, Any], schedule: dict[str, Any]) -> Any:
    """Return the loss and the gradient as a whole tree, of the second of two calls."""
    plan, sharded, shards = of_module(mesh, model(), NAMES, schedule=schedule, how={"cast": eight_bits}, **options)
    evaluate = fs.value_and_grad(lambda s: sharded(s, {}, inputs(mesh.rank)).square().mean())
    for _ in range(2):
        (loss, grads), events = recorded(evaluate, shards)
    assert events == fs.predict_events(plan, sharded.schedule, not_saved=["0"], cast=eight_bits)
    return loss, dict(fs.gather(grads, plan, mesh))


def straight_through(ranks: int, count: int) -> Any:
    """Return each rank's loss and the mean gradient of the model at the rounded parameters."""
    apply, params, _ = fs.make_functional(model())

    def rounded_by_shards(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(params, mesh, units=NAMES)
        return fs.gather(tree.map(lambda shard: rounded(shard, 1), fs.shard(params, plan, mesh)), plan, mesh)

    values = {name: value.requires_grad_() for name, value in fs.simulate(rounded_by_shards, ranks)[0].items()}
    losses = [apply(values, {}, inputs(rank)).square().mean() for rank in range(count)]
    grads = [torch.autograd.grad(loss, list(values.values())) for loss in losses]
    means = [sum(each) / count for each in zip(*grads, strict=True)]
    return [loss.detach() for loss in losses], dict(zip(values, means, strict=True))


@pytest.mark.nightly(one_in=2)
@crossed(ahead=AHEAD, world=[1, 2], options=OPTIONS)
def test_gradients_are_those_at_the_rounded_parameters(world: int, options: dict[str, Any], ahead: dict[str, Any]) -> None:
    results = run_simulated(gradient, world, options, ahead)
    ranks = 1 if options.get("strategy") == "no_shard" else world
    losses, wanted = straight_through(ranks, world)
    same_bits(results, [(loss, wanted) for loss in losses])


def doubled_in_place(mesh: fs.Mesh) -> float:
    cast = lambda unit, buffer: fs.Cast(lambda x: x, lambda rows: rows.mul_(2.0).view(-1))  # noqa: E731
    _, f, shards = by_hand(mesh, {"w": torch.ones(100, 400)}, lambda leaves: leaves["w"].sum(), cast=cast)
    return f(shards[""]).item()


def test_what_was_gathered_for_a_cast_is_each_ranks_own() -> None:
    assert run_ranks(doubled_in_place, 2) == run_simulated(doubled_in_place, 2) == [80_000.0] * 2


@on_ranks(2)
def test_a_cast_meets_a_param_dtype(mesh: fs.Mesh) -> None:
    """post_all_gather must return param_dtype; gradients are reduced in reduce_dtype; frozen buffers are left alone."""

    def half(unit: Any, buffer: Any) -> fs.Cast | None:
        after = blocks_of(buffer.shard_numel)
        return fs.Cast(quantise, lambda rows: after(rows).bfloat16()) if buffer.trainable else None

    precision = fs.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    plan, sharded, shards = of_module(mesh, model(frozen=["2.weight"]), NAMES, how={"cast": half}, precision=precision)
    evaluate = fs.value_and_grad(lambda s: sharded(s, {}, inputs(0)).float().square().mean())
    (_, grads), events = recorded(evaluate, shards)
    assert events == fs.predict_events(plan, sharded.schedule, not_saved=["0"], cast=half)
    assert sharded(shards, {}, inputs(0)).dtype == torch.bfloat16
    gathered = {(event.unit, event.buffer): event.dtype for event in events if event.kind == "all_gather"}
    assert gathered == {**{(unit, "float32"): "int8" for unit in ("", *NAMES)}, ("2", "float32.frozen"): "bfloat16"}
    assert {event.dtype for event in events if event.kind == "reduce_scatter"} == {"float32"}
    assert {leaf.dtype for leaf in tree.leaves(grads)} == {torch.float32}


def unit_function(mesh: fs.Mesh, cast: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a function of this rank's shard, the shard, and the gathered buffer."""
    w = torch.linspace(-1, 1, 12).reshape(4, 3)
    _, f, shards = by_hand(mesh, {"w": w}, lambda leaves, x: (x @ leaves["w"]).sin().sum(), cast=cast)
    full = w.flatten() if cast is None else rounded(w.flatten(), mesh.shard.size)
    return (lambda shard, x: f({"float32": shard}, x)), shards[""]["float32"], full.view(4, 3)


def mine(mesh: fs.Mesh, full: torch.Tensor) -> torch.Tensor:
    return full.flatten().chunk(mesh.shard.size)[mesh.shard.rank]


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_transforms_see_the_rounded_values(mesh: fs.Mesh, world: int) -> None:
    """Derivatives are those at the rounded values; tangents and stacks of shards are gathered unrounded."""
    f, shard, full = unit_function(mesh, eight_bits)
    exact, _, w = unit_function(mesh, None)
    n = mesh.world_size

    def whole(w: torch.Tensor) -> torch.Tensor:
        return (X @ w).sin().sum()

    wanted = torch.func.grad(whole)(full)
    assert torch.equal(torch.func.grad(f)(shard, X), mine(mesh, n * wanted))
    value, pull = torch.func.vjp(f, shard, X)
    assert torch.equal(value, whole(full))
    assert torch.equal(pull(torch.ones(()))[0], mine(mesh, n * wanted))
    stack = torch.stack([shard, 2 * shard, -shard])
    found = torch.vmap(f, in_dims=(0, None))(stack, X)
    torch.testing.assert_close(found, torch.vmap(whole)(torch.stack([w, 2 * w, -w])))
    assert torch.equal(torch.vmap(f, in_dims=(None, 0))(shard, torch.stack([X, X]))[1], f(shard, X))
    assert not torch.equal(f(shard, X), exact(shard, X))
    tangent = torch.linspace(1, 2, 12).reshape(4, 3)
    found = torch.func.jvp(lambda s: f(s, X), (shard,), (mine(mesh, tangent),))
    torch.testing.assert_close(found, torch.func.jvp(whole, (full,), (tangent,)))
    along = torch.func.jvp(lambda s: torch.func.grad(f)(s, X), (shard,), (mine(mesh, tangent),))[1]
    hvp = torch.func.jvp(torch.func.grad(whole), (full,), (tangent,))[1]
    torch.testing.assert_close(along, mine(mesh, n * hvp))


GIVES = r"must return, after gathering, a 1-D tensor of 12 elements and torch\.float32, its param_dtype; found "
SENDS = r"must return, before gathering, a 1-D tensor, the data to send; "
WRONG: dict[str, tuple[Any, Any, str]] = {
    "rows": (torch.clone, lambda rows: rows.float(), GIVES + r"\((2, 6|1, 12)\) and"),
    "too few": (torch.clone, lambda rows: rows.flatten()[:10], GIVES + r"\(10,\) and torch\.float32"),
    "another dtype": (torch.clone, lambda rows: rows.flatten().double(), GIVES + r"\(12,\) and torch\.float64"),
    "2-D": (lambda shard: shard.view(2, -1), torch.flatten, SENDS),
    "no tensor": (torch.Tensor.tolist, torch.flatten, SENDS),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", WRONG)
@on_ranks()
def test_a_cast_that_gives_something_else_is_refused(mesh: fs.Mesh, name: str, world: int) -> None:
    before, after, words = WRONG[name]
    f, shard, _ = unit_function(mesh, lambda unit, buffer: fs.Cast(before, after))
    with pytest.raises(ValueError, match=r"the cast of buffer 'float32' of unit '\(root\)' " + words):
        f(shard, X)
