"""Functions of the user's carry the parameters and gradients of units, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.comm.user_collectives import Collectives
from tests.core.units import forward_mode, mlp, of_module, of_precision_page, recorded, same_bits
from tests.ranks import on_ranks, run_ranks, run_simulated

pytestmark = forward_mode

GRID = {"replicate": 2, "shard": 2}
NAMES = ["0", "2"]


APPLY, PARAMS, BUFFERS = fs.make_functional(mlp(5, 17, 9, 3, dtype=torch.float32))


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank), requires_grad=True)


def gather(shard: torch.Tensor, collectives: Collectives) -> Callable[[], torch.Tensor]:
    return collectives.all_gather(shard).wait


def add(tensor: torch.Tensor, collectives: Collectives) -> Callable[[], torch.Tensor]:
    return collectives.all_reduce(tensor).wait


def scatter_in_rows(full: torch.Tensor, collectives: Collectives) -> Callable[[], torch.Tensor]:
    """Add up what an all-to-all brings, from the first rank to the last, as the plain one does."""
    received = collectives.all_to_all(full.view(collectives.size, -1))

    def finish() -> torch.Tensor:
        rows = received.wait()
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total

    return finish


def gather_backwards(shard: torch.Tensor, collectives: Collectives) -> Callable[[], torch.Tensor]:
    """Send each shard last element first, and turn it round again."""
    pending = collectives.all_gather(shard.flip(0))
    return lambda: pending.wait().view(collectives.size, -1).flip(1).flatten()


OWN: dict[str, dict[str, Any]] = {
    "rows and backwards": {"shard": {"all_gather": gather_backwards, "reduce_scatter": scatter_in_rows}},
    "on both axes": {
        "shard": {"all_gather": gather, "reduce_scatter": scatter_in_rows, "all_reduce": add},
        "replicate": {"all_reduce": add},
    },
}


def gradient(mesh: fs.Mesh, options: dict[str, Any]) -> Any:
    """Return the loss and the gradient as a whole tree; the events must be predicted."""
    plan, sharded, shards = of_module(mesh, (APPLY, PARAMS, BUFFERS), NAMES, **options)
    evaluate = fs.value_and_grad(lambda s: sharded(s, BUFFERS, inputs(mesh.rank)).square().mean())
    evaluate(shards)
    (loss, grads), events = recorded(evaluate, shards)
    assert events == fs.predict_events(plan, sharded.schedule)
    return loss, dict(fs.gather(grads, plan, mesh))


LOW = {"precision": fs.MixedPrecision(torch.bfloat16, torch.float32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "options", "world"),
    [
        ("rows and backwards", {}, GRID),
        ("rows and backwards", {"strategy": "shard_grad_op"}, GRID),
        ("rows and backwards", {}, 3),
        ("on both axes", {"strategy": "no_shard"}, GRID),
        ("on both axes", LOW, GRID),
    ],
    ids=str,
)
@on_ranks()
def test_functions_that_only_move_data_change_no_bit_and_no_event(mesh: fs.Mesh, own: str, options: Any, world: Any) -> None:
    on = mesh
    for axis, functions in OWN[own].items():
        on = fs.with_collectives(on, axis, **functions)
    same_bits(gradient(on, options), gradient(mesh, options))


PAGE = of_precision_page("BLOCK = 64\n", "def gather_eight_bits")
EIGHT_BITS = {"all_gather": PAGE["gather_eight_bits"], "reduce_scatter": PAGE["reduce_eight_bits"]}


def rounded(flat: torch.Tensor, ranks: int) -> torch.Tensor:
    parts = flat.chunk(ranks)
    return torch.cat([PAGE["blocks_of"](part.numel())(PAGE["quantise"](part).view(1, -1)) for part in parts])


def test_the_pages_functions_round_parameters_and_each_ranks_gradient_once() -> None:
    def main(mesh: fs.Mesh) -> Any:
        own = fs.with_collectives(mesh, "shard", **EIGHT_BITS)
        plan = fs.make_plan(PARAMS, own)
        f = fs.unshard(lambda leaves, x: (APPLY(leaves, BUFFERS, x)).square().mean(), plan.units[""], own)
        shards = fs.shard(PARAMS, plan, own)
        return fs.value_and_grad(lambda s: f(s[""], inputs(mesh.rank)))(shards)

    found = fs.simulate(main, 2)
    ((_, buffer),) = [(u, b) for u in fs.make_plan(PARAMS, 2).unit_list for b in u.buffers]
    flat = torch.cat([PARAMS[leaf.path].detach().flatten() for leaf in buffer.leaves])
    flat = torch.nn.functional.pad(flat, (0, buffer.padded_numel - buffer.numel))
    each = []
    for rank in range(2):
        values = rounded(flat, 2).requires_grad_()
        leaves = {leaf.path: values[leaf.offset : leaf.offset + leaf.numel].view(leaf.shape) for leaf in buffer.leaves}
        loss = APPLY(leaves, BUFFERS, inputs(rank)).square().mean()
        each.append(rounded(torch.autograd.grad(loss, values)[0], 2))
        torch.testing.assert_close(found[rank][0], loss, rtol=1e-6, atol=0)
    wanted = ((each[0] + each[1]) / 2).chunk(2)
    for rank in range(2):
        torch.testing.assert_close(found[rank][1][""]["float32"], wanted[rank], rtol=1e-5, atol=1e-8)


def eight_bits_on(mesh: fs.Mesh) -> Any:
    return gradient(fs.with_collectives(mesh, "shard", **EIGHT_BITS), {})


@pytest.mark.slow
def test_processes_give_the_bits_of_simulated_ranks() -> None:
    same_bits(run_ranks(eight_bits_on, 2), run_simulated(eight_bits_on, 2))


def zeros(tensor: torch.Tensor, collectives: Collectives) -> Callable[[], torch.Tensor]:
    return lambda: tensor.new_zeros(tensor.numel() * collectives.size)


@on_ranks(2)
def test_state_sums_and_tangents_are_carried_by_the_plain_collectives(mesh: fs.Mesh) -> None:
    own = fs.with_collectives(mesh, "shard", all_gather=zeros)
    own = fs.with_collectives(own, "shard", all_reduce=lambda tensor, _: lambda: tensor * 0)  # adds to the first
    plan = fs.make_plan(PARAMS, own, units=NAMES)
    shards = fs.shard(PARAMS, plan, own)
    for again in (fs.gather(shards, plan, own), fs.to_state_dict(shards, plan, own)):
        assert all(torch.equal(again[name], leaf) for name, leaf in PARAMS.items())
    assert fs.psum(torch.ones(2), own).tolist() == [2.0, 2.0]
    assert torch.equal(fs.global_norm(shards, plan, own), fs.global_norm(shards, plan, mesh))
    f = fs.unshard(lambda leaves: leaves["weight"] * 1, plan.units["0"], own)
    out, tangent = torch.func.jvp(lambda s: f({"float32": s}), (shards["0"]["float32"],), (shards["0"]["float32"],))
    assert not out.any()
    assert torch.equal(tangent, PARAMS["0.weight"])
    assert own.reshaped(own.shape) is own


def test_one_rank_has_nothing_to_carry() -> None:
    mesh = fs.Mesh()
    assert fs.with_collectives(mesh, "shard", all_gather=zeros) is mesh


WHERE = r"of with_collectives along 'shard', for buffer 'float32' of unit '.root.', must"
GIVE = rf"all_gather {WHERE} give"
WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no function": ({"all_gather": lambda t, c: t}, TypeError, rf"all_gather {WHERE} return a function .* found Tensor"),
    "shape": ({"all_gather": lambda t, c: lambda: t}, ValueError,
              rf"{GIVE} a tensor of shape \(30,\) and torch\.float32; found \(15,\) and torch\.float32"),
    "reduce_scatter": ({"reduce_scatter": lambda t, c: lambda: t}, ValueError,
                       r"reduce_scatter of with_coll.* must give a tensor of shape .* found"),
    "parts": ({"all_gather": lambda t, c: c.all_to_all(t[:1]).wait}, ValueError,
              r"dim 0 .* each of 2 ranks; found .*\(1,\)"),
}  # fmt: skip


@pytest.mark.parametrize(("functions", "kind", "words"), WRONG.values(), ids=WRONG)
def test_a_result_that_does_not_fit_is_an_error(functions: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        fs.simulate(lambda mesh: gradient(fs.with_collectives(mesh, "shard", **functions), {}), 2)
