"""Casts around collectives as linear maps: adjoints, tangents, dtypes of gradients, and memory."""

from typing import Any

import pytest
import torch

import funcshard as fs
from tests.core.units import by_hand, recorded
from tests.pairwise import crossed
from tests.ranks import on_ranks

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
X = torch.linspace(-1, 2, 8, dtype=torch.float64).reshape(2, 4)


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
