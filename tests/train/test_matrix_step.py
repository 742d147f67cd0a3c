"""An optimizer of one whole matrix on shards equals itself on the whole model."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import on_ranks, run_ranks, run_simulated

SHAPES = {"emb": (9, 4), "experts": (4, 6, 2), "scale": (5,), **{f"blocks.{i}.w": (6, 8 - i) for i in range(3)}, "bias": ()}
CUTS = {"experts": {"expert": 0, "tensor": 1}, "blocks.0.w": {"tensor": 0}, "blocks.1.w": {"shard": 0}}


def init(matrix):
    return {"factors": [torch.eye(side, dtype=matrix.dtype) for side in matrix.shape], "steps": 0, "first": matrix.clone()}


def update(grad, state, matrix):
    left, right = state["factors"]
    left, right = left + grad @ grad.T, right.lerp(grad.T @ grad, 0.5)
    change = -0.1 * (left @ grad @ right) / left.norm() - 0.01 * (matrix + state["first"]) / (1 + state["steps"])
    return change, {**state, "factors": [left, right], "steps": state["steps"] + 1}


def without_matrix(grad, state):
    return update(grad, state, torch.zeros_like(grad))


def momentum(params):
    return {"trace": tree.map(torch.zeros_like, params), "count": 0}


def heavy_ball(grads, state, params=None):
    trace = tree.map(lambda old, grad: 0.9 * old + grad, state["trace"], grads)
    return tree.map(lambda leaf: -0.1 * leaf, trace), {"trace": trace, "count": state["count"] + 1}


@dataclass(frozen=True)
class Case:
    """A mesh, and the options of plan and optimizer."""

    mesh: dict[str, int]
    plan: dict[str, Any] = field(default_factory=dict)
    cuts: dict[str, dict[str, int]] = field(default_factory=dict)
    update: Any = update
    pair: bool = False
    matrices: list[str] | None = None
    half: bool = False

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tensors = {path: torch.randn(shape, generator=generator) for path, shape in SHAPES.items()}
        if self.half:
            tensors["blocks.1.w"] = tensors["blocks.1.w"].bfloat16()
        return tensors

    def slices(self, seed: int, mesh: fs.Mesh) -> dict[str, torch.Tensor]:
        tensors = self.tensors(seed)
        for path, cuts in self.cuts.items():
            for axis, dim in cuts.items():
                tensors[path] = tensors[path].chunk(mesh.shape[axis], dim)[mesh.position[axis]]
        return tensors

    def others(self, **options: Any) -> Any:
        if self.pair:
            return momentum, heavy_ball
        return fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, **options)


def on_the_whole(case: Case, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return parameters, and the state of each matrix, as plain functions compute them."""
    params = case.tensors(0)
    chosen = [path for path in SHAPES if case.matrices is None or path.partition(".")[0] in case.matrices]
    views = {path: leaf for path, leaf in params.items() if leaf.ndim == 2 and path in chosen}
    views |= {f"experts[{i}]": leaf for i, leaf in enumerate(params["experts"]) if "experts" in chosen}
    states = {path: init(leaf) for path, leaf in views.items()}
    trace = {path: torch.zeros_like(leaf) for path, leaf in params.items()}
    for step in range(steps):
        grads = case.tensors(100 + step)
        for path, leaf in views.items():
            name, _, item = path.rstrip("]").partition("[")
            grad = grads[name][int(item)] if item else grads[path]
            args = (grad, states[path], leaf)[: 3 if case.update is update else 2]
            change, states[path] = case.update(*args)
            leaf += change
        for path in params.keys() - {name.partition("[")[0] for name in views}:
            trace[path] = 0.9 * trace[path] + grads[path]
            params[path] -= 0.1 * trace[path]
    return params, states


def on_shards(mesh: fs.Mesh, case: Case, steps: int) -> tuple[Any, ...]:
    plan = fs.make_plan(case.slices(0, mesh), mesh, **{"units": ["blocks.*"], "local": case.cuts, **case.plan})
    optimizer = fs.per_matrix(init, case.update, plan, mesh, others=case.others(), matrices=case.matrices)
    shards = fs.shard(case.slices(0, mesh), plan, mesh)
    state = optimizer.init(shards)
    for step in range(steps):
        with fs.record_events() as events:
            shards, state = optimizer.step(fs.shard(case.slices(100 + step, mesh), plan, mesh), state, shards)
        assert tuple(events) == optimizer.step.owners.events
        if step == 1:
            for options, src in (({}, None), ({"sharded": True}, None), ({"rank0_only": True}, 0)):
                if case.mesh.keys() <= {"shard", "replicate"} or not options:
                    by_name = fs.optimizer_to_state_dict(state, optimizer, plan, mesh, **options)
                    again = fs.optimizer_from_state_dict(by_name, optimizer, plan, mesh, src=src, steps=2)
                    torch.testing.assert_close(again, state, rtol=0, atol=0)
            state = again
    by_name = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)
    assert sorted(path for group in by_name["param_groups"] for path in group["params"]) == sorted(SHAPES)
    return fs.to_state_dict(shards, plan, mesh), by_name["state"], [*state["matrices"]]


GRID, EXPERTS = {"shard": 2, "tensor": 2}, {"expert": 2, "tensor": 2}
CASES = {
    **{f"{ranks} ranks": Case({"shard": ranks}) for ranks in (1, 2, 3, 5)},
    "hybrid": Case({"replicate": 2, "shard": 2}),
    "gradients alone": Case({"shard": 3}, update=without_matrix),
    "chosen nodes": Case({"shard": 2}, matrices=["blocks"]),
    "a pair for others, two dtypes": Case({"shard": 3}, pair=True, half=True),
    "no_shard": Case({"shard": 3}, {"strategy": "no_shard"}),
    "one unit": Case({"shard": 3}, {"units": []}),
    "cut rows": Case(GRID, cuts={"blocks.0.w": {"tensor": 0}, "experts": {"tensor": 2}}),
    "experts on their ranks": Case({"expert": 2, "shard": 2}, cuts={"experts": {"expert": 0}}),
    "cut experts": Case({**EXPERTS, "shard": 2}, cuts=CUTS),
}  # fmt: skip
BY_DAY = ("3 ranks", "a pair for others, two dtypes", "cut rows", "cut experts")
RUNS = [
    pytest.param(run_simulated, name, id=name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in CASES
] + [pytest.param(run_ranks, "cut rows", id="on processes", marks=pytest.mark.nightly(one_in=2))]


@pytest.mark.parametrize(("run", "name"), RUNS)
def test_three_steps_on_shards_are_three_steps_on_the_whole(run, name):
    case = CASES[name]
    wanted, states = on_the_whole(case, 3)
    results = run(on_shards, math.prod(case.mesh.values()), case, 3, shape=case.mesh)
    for params, by_name, _ in results:
        for path, state in states.items():
            name, _, item = path.rstrip("]").partition("[")
            entries = tree.describe(state)
            for value, entry in zip(*entries[1:], strict=True):
                torch.testing.assert_close(by_name[name][f"{item}." * bool(item) + entry], value, rtol=0, atol=0)
        for path, leaf in wanted.items():
            exact = any(name.partition("[")[0] == path for name in states)  # SGD may fuse operations
            torch.testing.assert_close(params[path], leaf, **({"rtol": 0, "atol": 0} if exact else {}))
    if case.mesh.keys() == {"shard"}:  # along other axes ranks repeat the work, or have other experts
        assert sorted(path for *_, owned in results for path in owned) == sorted(states)


def trained(mesh, units, begin, end, path=None, moved=None):
    """Return the parameters, and the state by name, after some steps of the same gradients."""
    case, plan = Case({}), fs.make_plan(Case({}).tensors(0), mesh, units=units)
    optimizer = fs.per_matrix(init, update, plan, mesh, others=case.others())
    shards = fs.shard(case.tensors(0), plan, mesh)
    state = optimizer.init(shards)
    if begin:
        shards, by_name, steps = moved[mesh.rank] if moved else fs.restore(path, plan, mesh)
        state = fs.optimizer_from_state_dict(by_name, optimizer, plan, mesh, steps=steps)
    for step in range(begin, end):
        shards, state = optimizer.step(fs.shard(case.tensors(step), plan, mesh), state, shards)
    by_name = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)
    if path and not begin:
        with pytest.raises(ValueError, match="a state of muon or per_matrix as optimizer_to_state_dict"):
            fs.save(path, (shards, state, end), plan, mesh)
        fs.save(path, (shards, by_name, end), plan, mesh)
    return fs.gather(shards, plan, mesh), by_name["state"], (shards, by_name, end), plan


def test_training_continues_to_the_bit_on_another_number_of_ranks(tmp_path):
    whole, states, *_ = run_simulated(trained, 2, ["blocks.*"], 0, 4)[0]
    saved = run_simulated(trained, 2, ["blocks.*"], 0, 2, tmp_path / "saved")
    old, new = saved[0][-1], fs.make_plan(Case({}).tensors(0), 3, units=["experts"])
    moved = fs.replan([results[2] for results in saved], old, new)
    for again in ((tmp_path / "saved", None), (None, moved)):
        for params, by_name, *_ in run_simulated(trained, 3, ["experts"], 2, 4, *again):
            torch.testing.assert_close((params, by_name), (whole, states), rtol=0, atol=0)


@pytest.mark.parametrize("case", [Case({}), Case({}, update=without_matrix)])
@on_ranks(2)
def test_a_matrix_without_a_gradient_stays_as_it_is(mesh, case):
    plan = fs.make_plan(case.tensors(0), mesh, units=["blocks.*"])
    optimizer = fs.per_matrix(init, case.update, plan, mesh, others=case.others())
    shards, grads = fs.shard(case.tensors(0), plan, mesh), fs.shard(case.tensors(1), plan, mesh)
    state = optimizer.init(shards)
    grads["blocks.1"] = dict.fromkeys(grads["blocks.1"])
    with fs.record_events() as events:
        shards, state = optimizer.step(grads, state, shards)
    assert tuple(events) == optimizer.step.owners.events
    stay = {path: torch.equal(leaf, case.tensors(0)[path]) for path, leaf in fs.gather(shards, plan, mesh).items()}
    assert [path for path in SHAPES if stay[path]] == ["blocks.1.w"]
    assert all(own["steps"] == (path != "blocks.1.w") for path, own in state["matrices"].items())


@on_ranks(2)
def test_a_donated_state_is_an_error(mesh):
    plan = fs.make_plan({"w": torch.eye(4)}, mesh)
    optimizer, shards = fs.per_matrix(init, update, plan, mesh), fs.shard({"w": torch.eye(4)}, plan, mesh)
    state = optimizer.init(shards)
    optimizer.step(shards, state, fs.copy(shards))
    with pytest.raises(RuntimeError, match="donated"):
        optimizer.step(shards, state, fs.copy(shards))


@on_ranks(2)
def test_a_state_of_other_matrices_is_an_error(mesh):
    tensors = Case({}).tensors(0)
    plan = fs.make_plan(tensors, mesh)
    make = lambda **options: fs.per_matrix(init, update, plan, mesh, others=Case({}).others(), **options)  # noqa: E731
    all_matrices, blocks = make(), make(matrices=["blocks"])
    shards = fs.shard(tensors, plan, mesh)
    state = all_matrices.init(shards)
    with pytest.raises(ValueError, match="must hold the matrices that this rank owns"):
        blocks.step(shards, state, shards)
    by_name = fs.optimizer_to_state_dict(all_matrices.init(shards), all_matrices, plan, mesh)
    by_name["state"]["emb"]["first"] = torch.ones(3)
    with pytest.raises(ValueError, match="'first' of 'emb' in the optimizer's state dict must have shape"):
        fs.optimizer_from_state_dict(by_name, all_matrices, plan, mesh)
    del by_name["state"]["emb"]["first"]
    with pytest.raises(ValueError, match=r"must hold .* of matrix 'emb', as init makes them"):
        fs.optimizer_from_state_dict(by_name, all_matrices, plan, mesh)
