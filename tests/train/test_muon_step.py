"""Muon on shards equals ``torch.optim.Muon`` on the whole model, with the predicted collectives."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from funcshard.testing import delayed
from tests.ranks import on_ranks, run_ranks, run_simulated

Tensors = dict[str, torch.Tensor]
EVEN, ODD = (32, 16, 48), (13, 7, 9)
MUON = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
ADAMW = {"lr": 0.01, "weight_decay": 0.2}
# The dimension of a leaf that each axis cuts.
CUTS = {"up": {"tensor": 0}, "down": {"tensor": 1}, "w": {"expert": 0, "tensor": 0}, "b": {"tensor": 0}}
NESTED = {"up": {"expert": 1, "tensor": 0}, "down": {"shard": 0}, "w": {"expert": 0, "tensor": 0}}


@dataclass(frozen=True)
class Case:
    """A model, a mesh and the options of its steps."""

    mesh: dict[str, int]
    sizes: tuple[int, int, int] = ODD
    options: dict[str, Any] = field(default_factory=lambda: MUON)
    dtype: torch.dtype = torch.float32
    plan: dict[str, Any] = field(default_factory=dict)
    cuts: dict[str, dict[str, int]] = field(default_factory=dict)

    def tensors(self, seed: int) -> Tensors:
        """Return parameters or gradients; Muon updates the matrices of the blocks."""
        (width, small, wide), generator = self.sizes, torch.Generator().manual_seed(seed)
        block = {"w": (width, width), "b": (width,), "up": (wide, width), "down": (small, wide)}
        blocks = {f"blocks.{i}.{name}": shape for i in range(3) for name, shape in block.items()}
        shapes: dict[str, tuple[int, ...]] = {"emb": (wide, width), **blocks, "norm": (width,)}
        return {path: torch.randn(shape, generator=generator).to(self.dtype) for path, shape in shapes.items()}

    def local(self, mesh: fs.Mesh) -> dict[str, dict[str, int]]:
        """Return how the axes of a mesh cut leaves, by path."""
        cuts = {path: self.cuts.get(path.rpartition(".")[2], {}) for path in self.tensors(0)}
        cuts = {path: {axis: dim for axis, dim in own.items() if axis in mesh.shape} for path, own in cuts.items()}
        return {path: own for path, own in cuts.items() if own}

    def slices(self, seed: int, mesh: fs.Mesh) -> Tensors:
        """Return the tensors as a rank holds them."""
        tensors = self.tensors(seed)
        for path, cuts in self.local(mesh).items():
            for axis, dim in cuts.items():
                tensors[path] = tensors[path].chunk(mesh.shape[axis], dim)[mesh.position[axis]]
        return tensors


def on_the_whole(case: Case, steps: int) -> tuple[Tensors, Tensors]:
    """Return the parameters and the momentum after some steps of ``torch.optim.Muon``."""
    params = {path: torch.nn.Parameter(leaf) for path, leaf in case.tensors(0).items()}
    at = lambda step: {name: value(step) if callable(value) else value for name, value in case.options.items()}  # noqa: E731
    matrices = {path: leaf for path, leaf in params.items() if leaf.ndim == 2 and path != "emb"}
    biases = [leaf for leaf in params.values() if leaf.ndim == 1]
    muon = torch.optim.Muon([*matrices.values()], **at(0))
    adamw = torch.optim.AdamW([{"params": [params["emb"]]}, {"params": biases, "weight_decay": 0.0}], **ADAMW)
    for step in range(steps):
        for path, grad in case.tensors(100 + step).items():
            params[path].grad = grad
        muon.param_groups[0].update(at(step))
        muon.step()
        adamw.step()
    momentum = {path: muon.state[leaf]["momentum_buffer"] for path, leaf in matrices.items()}
    return {path: leaf.detach() for path, leaf in params.items()}, momentum


def on_shards(mesh: fs.Mesh, case: Case, steps: int) -> tuple[Tensors, Tensors]:
    plan = fs.make_plan(case.slices(0, mesh), mesh, **{"units": ["blocks.*"], "local": case.local(mesh), **case.plan})
    no_decay = {"paths": ["norm", "**.b"], "weight_decay": 0.0}
    optimizer = fs.muon(plan, mesh, matrices=["blocks.*"], adamw={**ADAMW, "groups": [no_decay]}, **case.options)
    shards = fs.shard(case.slices(0, mesh), plan, mesh)
    pointers = [leaf.data_ptr() for leaf in tree.leaves(shards)]
    state = optimizer.init(shards)
    for step in range(steps):
        grads = fs.shard(case.slices(100 + step, mesh), plan, mesh)
        with fs.record_events() as events:
            shards, state = optimizer.step(grads, state, shards)
        assert tuple(events) == optimizer.step.owners.events
        by_name = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)
        if step == 1:
            again = fs.optimizer_from_state_dict(by_name, optimizer, plan, mesh)
            torch.testing.assert_close(again["momentum"], state["momentum"], rtol=0, atol=0)
            state = again
    assert [leaf.data_ptr() for leaf in tree.leaves(shards)] == pointers  # donated
    assert state["steps"] == steps
    momentum = {path: own["momentum_buffer"] for path, own in by_name["state"].items() if "momentum_buffer" in own}
    return fs.to_state_dict(shards, plan, mesh), momentum


CASES: dict[str, Case] = {
    **{
        f"{name} sizes on {world}": Case(world, sizes)
        for name, sizes, worlds in (("even", EVEN, (4,)), ("odd", ODD, (1, 2, 3, 4)))
        for world in (*({"shard": n} for n in worlds), {"replicate": 2, "shard": 2})
    },
    "no momentum look-ahead": Case({"shard": 3}, options={**MUON, "nesterov": False}),
    "rms": Case({"shard": 3}, options={**MUON, "adjust_lr_fn": "match_rms_adamw"}),
    "fewer iterations": Case(
        {"shard": 3}, options={**MUON, "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3}
    ),
    "schedules": Case(
        {"shard": 3}, options={**MUON, "lr": lambda step: 0.1 * step, "momentum": lambda step: 0.5 + 0.1 * step}
    ),
    "tensor lr": Case({"shard": 3}, options={**MUON, "lr": torch.tensor(0.05)}),
    "bfloat16": Case({"shard": 3}, dtype=torch.bfloat16),
    "no_shard": Case({"shard": 3}, plan={"strategy": "no_shard"}),
    "one unit": Case({"shard": 3}, plan={"units": []}),
    **{
        f"cut on {mesh}, {strategy}": Case(mesh, EVEN, plan={"strategy": strategy}, cuts=CUTS)
        for mesh in (
            {"shard": 2, "tensor": 2}, {"replicate": 2, "shard": 2, "tensor": 2}, {"tensor": 2, "shard": 3}, {"tensor": 4},
            {"expert": 2, "tensor": 2}, {"shard": 2, "tensor": 1},
        )
        for strategy in ("full_shard", "no_shard")
    },
    "cut along several axes": Case({"expert": 2, "shard": 2, "tensor": 2}, EVEN, cuts=NESTED),
}  # fmt: skip


ON_PROCESSES = "cut on {'shard': 2, 'tensor': 2}, full_shard"
RUNS = {**{name: (run_simulated, name) for name in CASES}, "on processes": (run_ranks, ON_PROCESSES)}


@pytest.mark.nightly(one_in=7)
@pytest.mark.parametrize(("run", "name"), RUNS.values(), ids=RUNS)
def test_four_steps_on_shards_are_four_steps_on_the_whole(run: Any, name: str) -> None:
    case = CASES[name]
    wanted, momentum = on_the_whole(case, 4)
    assert not torch.equal(wanted["blocks.0.w"], case.tensors(0)["blocks.0.w"])
    for params, own_momentum in run(on_shards, math.prod(case.mesh.values()), case, 4, shape=case.mesh):
        if case.dtype is torch.bfloat16:  # so coarse that a kernel's vector instructions matter
            torch.testing.assert_close(params, wanted, rtol=0.02, atol=0.02)
            continue
        torch.testing.assert_close(own_momentum, momentum, rtol=0, atol=0)
        torch.testing.assert_close(params, wanted)
        assert all(torch.equal(params[path], wanted[path]) for path in (momentum if case.cuts else wanted))


@pytest.mark.slow
@on_ranks(2)
def test_the_step_waits_for_the_all_to_alls(mesh: fs.Mesh) -> None:
    case = Case({"shard": 2})
    found = on_shards(delayed(mesh, "all_to_all", 0.002), case, 2)
    torch.testing.assert_close(found, on_the_whole(case, 2), rtol=0, atol=0)


@on_ranks(2)
def test_matrices_that_are_local_to_a_rank_are_updated_there_without_collectives(mesh: fs.Mesh) -> None:
    params = {"expert": torch.eye(4) + mesh.rank, "b": torch.ones(3)}
    grads = {"expert": torch.arange(16.0).view(4, 4) * (mesh.rank + 1), "b": torch.zeros(3)}
    plan = fs.make_plan(params, mesh, local=["expert"])
    optimizer = fs.muon(plan, mesh, **MUON)
    shards = fs.shard(params, plan, mesh)
    with fs.record_events() as events:
        shards, _ = optimizer.step(fs.shard(grads, plan, mesh), optimizer.init(shards), shards)
    assert tuple(events) == optimizer.step.owners.events == ()
    assert optimizer.step.owners.of == {"expert": None}
    leaf = torch.nn.Parameter(params["expert"].clone())
    leaf.grad = grads["expert"]
    torch.optim.Muon([leaf], **MUON).step()
    assert torch.equal(fs.gather(shards, plan, mesh)["expert"], leaf)


@on_ranks(2)
def test_the_momentum_of_a_local_matrix_in_bfloat16_stays_as_it_is(mesh: fs.Mesh) -> None:
    """torch's function divides its argument in place, and without look-ahead that is the momentum."""
    params = {"expert": torch.eye(4, dtype=torch.bfloat16)}
    plan = fs.make_plan(params, mesh, local=["expert"])
    optimizer, shards = fs.muon(plan, mesh, nesterov=False, momentum=0.0), fs.shard(params, plan, mesh)
    _, state = optimizer.step(fs.copy(shards), optimizer.init(shards), shards)
    assert torch.equal(state["momentum"][""]["bfloat16.local"].view(4, 4), params["expert"])


@on_ranks(2)
def test_momentum_is_of_matrices_and_adamws_state_of_the_rest(mesh: fs.Mesh) -> None:
    tensors = Case({"shard": 2}, EVEN).tensors(0)
    plan = fs.make_plan(tensors, mesh, units=["blocks.*"])
    optimizer, shards = fs.muon(plan, mesh, matrices=["blocks.*"]), fs.shard(tensors, plan, mesh)
    _, state = optimizer.step(fs.copy(shards), optimizer.init(shards), shards)
    averages = [own["exp_avg"] for each in state["adamw"]["leaves"].values() for own in each.values()]
    momentum, adamw = (sum(leaf.numel() for leaf in tree.leaves(part)) for part in (state["momentum"], averages))
    counts = fs.psum(torch.tensor([momentum, adamw]), mesh).tolist()
    matrices = sum(leaf.numel() for path, leaf in tensors.items() if path.startswith("blocks.") and not path.endswith(".b"))
    assert counts == [matrices, sum(leaf.numel() for leaf in tensors.values()) - matrices]


@pytest.mark.parametrize("nesterov", [True, False])
@on_ranks(2)
def test_what_has_no_gradient_stays_as_it_is_as_in_torch(mesh: fs.Mesh, nesterov: bool) -> None:
    params = {"a": torch.randn(6, 4), "b": torch.randn(4, 4), "v": torch.randn(5), "n": torch.randn(3)}
    gradients = {name: torch.randn_like(leaf) for name, leaf in params.items()}
    whole = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    muon = torch.optim.Muon([whole["a"], whole["b"]], nesterov=nesterov, **MUON)
    adamw = torch.optim.AdamW([whole["v"], whole["n"]], **ADAMW)
    plan = fs.make_plan(params, mesh, units=list(params))
    optimizer, shards = fs.muon(plan, mesh, adamw=ADAMW, nesterov=nesterov, **MUON), fs.shard(params, plan, mesh)
    state = optimizer.init(shards)
    for absent in (("b", "n"), ("a", "b", "n"), (), ("a", "v")):
        for name, leaf in whole.items():
            leaf.grad = None if name in absent else gradients[name].clone()
        muon.step()
        adamw.step()
        grads = fs.shard(gradients, plan, mesh)
        grads = {unit: dict.fromkeys(flat, None) if unit in absent else flat for unit, flat in grads.items()}
        with fs.record_events() as events:
            shards, state = optimizer.step(grads, state, shards)
        assert tuple(events) == optimizer.step.owners.events
    result = fs.gather(shards, plan, mesh)
    assert all(torch.equal(result[name], leaf) for name, leaf in whole.items())


def test_the_work_on_cut_matrices_is_shared_along_their_axes() -> None:
    params = {f"w{i}": torch.zeros(4, 8) for i in range(8)}
    plan = fs.make_plan(params, {"shard": 2, "tensor": 2}, local={"*": {"tensor": 0}})
    owners = fs.assign_owners(plan)
    table = str(owners)
    assert table.startswith("Owners of 8 matrices, ")
    assert "shard × tensor" in table
    assert [row.split()[3] for row in table.splitlines() if row.strip()[:1] in "01"] == ["2"] * 4, table
    axes = [event.axis for event in owners.events]
    assert axes == ["shard", "tensor", "tensor", "shard"]
