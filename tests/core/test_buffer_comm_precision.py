"""Casts around collectives as linear maps: adjoints, derivatives, dtypes of gradients, and memory."""

from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.comm.topology import CommDtypes, Topology
from funcshard.core.buffer_comm import BufferComm
from tests.core.test_flat_buffer_adjoints import gathered, reduced
from tests.pairwise import crossed

# The first use of forward-mode AD makes torch import a file that calls a deprecated function of
# torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

WORLDS = [1, 2, 3, {"replicate": 2, "shard": 2}]
WIDE = fs.MixedPrecision(torch.float32, reduce_dtype=torch.float64)


def comm_of(mesh: fs.Mesh, sharded: bool, keeps: bool = False) -> BufferComm:
    """Return the communication of float64 shards that are gathered in float32 and reduced in float64."""
    wide, narrow = torch.float64, torch.float32
    return BufferComm(Topology(mesh, sharded), "unit", "float64", CommDtypes(wide, narrow, wide, keeps))


def whole_numbers(seed: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers whose sums and products are exact in every dtype of this file."""
    return torch.randint(-64, 65, (n,), generator=torch.Generator().manual_seed(seed)).to(dtype)


@crossed(keeps={"dtype of the shard": False, "kept": True}, sharded=[True, False], world=WORLDS)
def test_the_backward_of_each_is_the_other_any_number_of_times(world: Any, sharded: bool, keeps: bool) -> None:
    def main(mesh: fs.Mesh) -> None:
        comm, cut = comm_of(mesh, sharded, keeps), mesh.shard.size if sharded else 1
        x = whole_numbers(mesh.rank, 5, torch.float64).requires_grad_()
        y = whole_numbers(100 + mesh.rank, 5 * cut, torch.float32).requires_grad_()
        v = whole_numbers(200 + mesh.rank, 5, torch.float64)
        (gx,) = torch.autograd.grad(gathered(x, comm), x, y, create_graph=True)
        assert gx.dtype == torch.float64
        assert torch.equal(gx, reduced(y.detach(), comm))
        (gy,) = torch.autograd.grad(gx, y, v)  # the adjoint of the adjoint
        assert gy.dtype == torch.float32
        assert torch.equal(gy, gathered(v, comm))

    fs.simulate(main, world)


W = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
V = torch.linspace(1, 2, 12, dtype=torch.float64).reshape(4, 3)
X = torch.linspace(-1, 2, 8, dtype=torch.float64).reshape(2, 4)


def one_unit(mesh: fs.Mesh, precision: fs.MixedPrecision) -> tuple[Any, Any, Any]:
    plan = fs.make_plan({"w": W}, mesh, precision=precision)
    f = fs.unshard(lambda leaves, x: (x @ leaves["w"]).sin().square().sum(), plan.units[""], mesh)

    def mine(full: torch.Tensor) -> torch.Tensor:
        return full.flatten().chunk(mesh.shard.size)[mesh.shard.rank].clone()

    def whole(w: torch.Tensor) -> torch.Tensor:
        return (X.to(precision.param_dtype) @ w.to(precision.param_dtype)).sin().square().sum()

    return (lambda shard: f({"float64": shard}, X)), whole, mine


def check_derivatives(mesh: fs.Mesh, forward: bool) -> None:
    f, whole, mine = one_unit(mesh, WIDE)
    n, shard, v = mesh.world_size, mine(W), mine(V)
    close = torch.testing.assert_close

    gradient = torch.func.grad(whole)(W)
    assert gradient.dtype == torch.float64
    assert torch.equal(torch.func.grad(f)(shard), mine(n * gradient))
    local, w = shard.requires_grad_(), W.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(local), local, create_graph=True)
    (h,) = torch.autograd.grad(g, local, v)
    (wanted,) = torch.autograd.grad(torch.autograd.grad(whole(w), w, create_graph=True)[0], w, V)
    # Why not equal: one side adds in float32 and the other in float64, so they round differently.
    close(h, mine(n * wanted), rtol=1e-6, atol=1e-6)
    assert h.dtype == torch.float64
    batch = torch.stack([shard.detach(), 2 * v])
    close(torch.vmap(f)(batch), torch.vmap(whole)(torch.stack([W, 2 * V])))
    if forward:
        value, tangent = torch.func.jvp(f, (shard.detach(),), (v,))
        close((value, tangent), torch.func.jvp(whole, (W,), (V,)))
        assert tangent.dtype == torch.float32
        along = torch.func.jvp(torch.func.grad(f), (shard.detach(),), (v,))[1]
        close(along, mine(n * torch.func.jvp(torch.func.grad(whole), (W,), (V,))[1]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_derivatives_are_those_of_the_whole_model_that_casts_its_parameters(world: int) -> None:
    # torch has one forward-mode level for the whole process, so ranks that are threads cannot each
    # use one.
    fs.simulate(lambda mesh: check_derivatives(mesh, world == 1), world)


@pytest.mark.slow
@crossed(
    strategy=["full_shard", "no_shard"],
    keep={"widened": False, "kept": True},
    reduce=[None, torch.bfloat16, torch.float32, torch.float64],
    world=[1, 2],
)
def test_gradients_have_the_dtype_that_the_page_says(world: int, reduce: Any, keep: bool, strategy: str) -> None:
    precision = fs.MixedPrecision(torch.float16, reduce, keep_low_precision_grads=keep)
    kept = (reduce or torch.float16) if keep else torch.float64

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan({"w": W}, mesh, precision=precision, strategy=strategy)
        f = fs.unshard(lambda leaves, x: (x @ leaves["w"]).square().mean(), plan.units[""], mesh)
        shards = fs.shard({"w": W}, plan, mesh)
        x = X.half()
        found = {
            "value_and_grad": fs.value_and_grad(lambda s: f(s[""], x))(shards)[1],
            "each": fs.accumulate(lambda s, x: f(s[""], x), 2)(shards, x)[1],
            "once": fs.accumulate(lambda s, x: f(s[""], x), 2, reduce="once")(shards, x)[1],
            "weighted": fs.value_and_grad(lambda s: (f(s[""], x), 2.0), weighted=True)(shards)[1],
        }
        for way, grads in found.items():
            assert grads[""]["float64"].dtype == kept, way
            whole = fs.gather(grads, plan, mesh)["w"]
            assert whole.dtype == torch.float64, way
            torch.testing.assert_close(whole, fs.gather(found["each"], plan, mesh)["w"], rtol=2e-2, atol=1e-2)
            norm = fs.global_norm(grads, plan, mesh)
            assert norm.dtype == torch.promote_types(kept, torch.float32), way
            torch.testing.assert_close(norm, whole.norm().to(norm))
            clipped, before = fs.clip_by_global_norm(grads, plan, mesh, 0.5)
            assert clipped[""]["float64"].dtype == kept
            assert torch.equal(before, norm)
        local = shards[""]["float64"].clone().requires_grad_()
        (plain,) = torch.autograd.grad(f({"float64": local}, x), local)
        assert plain.dtype == torch.float64
        assert torch.func.grad(lambda s: f({"float64": s}, x))(local.detach()).dtype == torch.float64

    fs.simulate(main, world)


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=str)
def test_unreduced_gradients_add_up_in_the_dtype_of_the_reduction(reduce: torch.dtype) -> None:
    """256 + 1 + 1 is exact in float32, and not in bfloat16."""
    rows = torch.tensor([256.0, 1.0, 1.0, 0.0])

    def main(mesh: fs.Mesh) -> float:
        plan = fs.make_plan({"w": torch.ones(2)}, mesh, precision=fs.MixedPrecision(torch.bfloat16, reduce))
        f = fs.unshard(lambda leaves, x: 4 * (leaves["w"] * x).sum(), plan.units[""], mesh)
        evaluate = fs.accumulate(lambda s, x: f(s[""], x), 4, reduce="once")
        return evaluate(fs.shard({"w": torch.ones(2)}, plan, mesh), rows)[1][""]["float32"].mean().item()

    wanted = 258.0 if reduce == torch.float32 else 256.0
    assert fs.simulate(main, 2) == [wanted] * 2


def test_complex_and_integer_leaves_stay_as_they_are() -> None:
    params = {"w": torch.ones(3), "z": torch.tensor([1 + 2j, 3 - 1j, 0.5j]), "i": torch.tensor([1, 2, 3])}

    def apply(leaves: Any) -> torch.Tensor:
        assert [leaves[key].dtype for key in "wzi"] == [torch.bfloat16, torch.complex64, torch.int64]
        return (leaves["w"].float() * leaves["z"].abs() * leaves["i"]).sum()

    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(params, mesh, precision=fs.MixedPrecision(torch.bfloat16, keep_low_precision_grads=True))
        f = fs.unshard(apply, plan.units[""], mesh)
        shards = fs.shard(params, plan, mesh)
        with fs.record_events() as events:
            _, grads = fs.value_and_grad(lambda s: f(s[""]))(shards)
        assert tuple(events) == fs.predict_events(plan)
        assert grads[""]["float32"].dtype == torch.bfloat16
        assert grads[""]["complex64"].dtype == torch.complex64
        assert [grad is None for grad in grads[""].values()] == [
            buffer.dtype == "int64" for buffer in plan.units[""].buffers
        ]
        assert {e.dtype for e in events if e.kind != "all_gather"} == {"bfloat16", "complex64"}
        back = fs.gather(shards, plan, mesh)
        return all(torch.equal(back[key], value) for key, value in params.items())

    assert fs.simulate(main, 2) == [True] * 2
