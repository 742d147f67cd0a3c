"""Mistakes around state dicts and checkpoints raise an error on every rank that names the remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree

O = torch.optim  # noqa: E741
GRID = {"replicate": 2, "shard": 2}
W = torch.arange(3.0)
PARAMS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(3, 2) + 10}
HALF = {name: value.half() for name, value in PARAMS.items()}
TURNED = {name: value.t().contiguous() for name, value in PARAMS.items()}
TIED = {"a": W, "b": W}


def saved(mesh: fs.Mesh, path: Path, state: Any) -> None:
    fs.save(path, state, fs.make_plan(PARAMS, mesh), mesh)


def restored(mesh: fs.Mesh, path: Path, other: Any, **options: Any) -> Any:
    plan = fs.make_plan(PARAMS, mesh)
    saved(mesh, path, {"s": fs.shard(PARAMS, plan, mesh)})
    new = fs.make_plan(other, mesh, **options)
    return fs.gather(fs.restore(path, new, mesh)["s"], new, mesh)


def whole(mesh: fs.Mesh, **options: Any) -> Any:
    plan = fs.make_plan(PARAMS, mesh)
    return fs.to_state_dict(fs.shard(PARAMS, plan, mesh), plan, mesh, **options)


def loaded(mesh: fs.Mesh, state_dict: Any, params: Any = PARAMS, **options: Any) -> Any:
    return fs.from_state_dict(state_dict, fs.make_plan(params, mesh), mesh, **options)


def cut(mesh: fs.Mesh, params: Any, plan_of: Any, **options: Any) -> Any:
    return fs.shard(params, fs.make_plan(plan_of, mesh), mesh, **options)


def on_another_mesh(use: Callable[..., Any]) -> Callable[[fs.Mesh, Path], Any]:
    def main(mesh: fs.Mesh, path: Path) -> Any:
        plan = fs.make_plan(PARAMS, mesh)
        other = mesh.reshaped(GRID if mesh.replicate.size == 1 else {"shard": 4})
        return use(fs.shard(PARAMS, plan, mesh), plan, other)

    return main


def optimizer_state(then: Any, now: Any) -> Callable[[fs.Mesh, Path], Any]:
    def main(mesh: fs.Mesh, path: Path) -> Any:
        plan = fs.make_plan(PARAMS, mesh)
        shards = fs.shard(PARAMS, plan, mesh)
        _, state = then.step(tree.map(torch.clone, shards), then.init(shards), shards)
        by_name = fs.optimizer_to_state_dict(state, then, plan, mesh)
        return fs.optimizer_from_state_dict(by_name, now, plan, mesh)

    return main


adamw, amsgrad = fs.torch_optimizer(O.AdamW), fs.torch_optimizer(O.AdamW, amsgrad=True)
momentum = fs.torch_optimizer(O.SGD, lr=0.1, momentum=0.9)
other_mesh = r"the plan was made for a mesh of .* ranks; found .*: make the plan with make_plan\(params, mesh\)"
asked = "must be the same on every rank; rank 0 has"
other_optimizer = "as this optimizer keeps; found .*: it is of another optimizer, or of other options; make the optimizer as"

MISUSES: dict[str, tuple[Callable[[fs.Mesh, Path], Any], str]] = {
    "gather on another mesh": (on_another_mesh(fs.gather), other_mesh),
    "to_state_dict on another mesh": (on_another_mesh(fs.to_state_dict), other_mesh),
    "export on another mesh": (on_another_mesh(lambda s, plan, mesh: fs.export_safetensors("x", s, plan, mesh)), other_mesh),
    "a plan of other dtypes": (lambda m, p: cut(m, PARAMS, HALF), "dtype float16, as planned; .* or make a new plan"),
    "a plan of other shapes": (lambda m, p: cut(m, PARAMS, TURNED), r"must have shape \(3, 2\) .* found \(2, 3\)"),
    "a state dict of other shapes": (lambda m, p: loaded(m, TURNED), r"must have shape \(2, 3\) .* or make a new plan"),
    "a state dict of other dtypes": (lambda m, p: loaded(m, HALF), "dtype float32, as planned; .* or make a new plan"),
    "src differs": (lambda m, p: cut(m, PARAMS, PARAMS, src=m.rank), f"options of shard {asked} src=0.* rank 1 has src=1"),
    "src on some ranks": (
        lambda m, p: loaded(m, PARAMS, src=0 if m.rank else None), f"of from_state_dict {asked} src=None.* 1 has src=0"
    ),
    "src and pieces": (
        lambda m, p: loaded(m, whole(m, sharded=True), src=0), "src the state dict must hold full tensors, .* leave src out"
    ),
    "the state dict of rank 0 on every rank": (
        lambda m, p: loaded(m, whole(m, rank0_only=True)), "it is empty, as rank0_only=True leaves it .* pass src=0"
    ),
    "rank0_only differs": (lambda m, p: whole(m, rank0_only=m.rank > 0), f"of to_state_dict {asked} rank0_only=False"),
    "sharded differs": (lambda m, p: whole(m, sharded=m.rank > 0), f"of to_state_dict {asked} rank0_only=False"),
    "pieces under another plan": (
        lambda m, p: fs.from_state_dict(whole(m, sharded=True), fs.make_plan(PARAMS, m, units=["b"]), m),
        "pieces of leaf .* must cover .* pass the pieces of all ranks",
    ),
    "params no longer tied": (
        lambda m, p: cut(m, {"a": W, "b": W * 2}, TIED), "'a' and 'b' of params are one leaf under the plan, .* tie them, or"
    ),
    "a state dict no longer tied": (
        lambda m, p: loaded(m, {"a": W, "b": W * 2}, TIED), "'a' and 'b' of the state dict are one leaf .* a new plan"
    ),
    "a checkpoint of other shapes": (lambda m, p: restored(m, p, TURNED), "leaf 'a' has shape .* is of another model"),
    "a checkpoint of other dtypes": (lambda m, p: restored(m, p, HALF), "in float32, and leaf 'a' is of float16"),
    "a checkpoint of other names": (
        lambda m, p: restored(m, p, {"a": PARAMS["a"], "c": PARAMS["b"]}), "holds the first but not the second"
    ),
    "a checkpoint of more leaves": (
        lambda m, p: restored(m, p, {"a": PARAMS["a"]}), "leaf 'b' of the state is not in the plan: the plan is of another"
    ),
    "a checkpoint of fewer leaves": (
        lambda m, p: restored(m, p, {**PARAMS, "c": W}, units=["c"]), r"the shard of unit 'c' must hold the buffers"
    ),
    "a checkpoint without local leaves": (
        lambda m, p: restored(m, p, PARAMS, local=["a"]), "is local to ranks under only one of the two plans"
    ),
    "a number without PerRank": (lambda m, p: saved(m, p, {"at": m.rank}), r"'at' of the state is 0 on rank 0 .* PerRank"),
    "a tensor without PerRank": (
        lambda m, p: saved(m, p, {"rng": torch.tensor(m.rank)}), r"tensor 'rng' of the state is not the same .* PerRank"
    ),
    "PerRank in a tree of shards": (
        lambda m, p: saved(m, p, {u: {k: fs.PerRank(s) for k, s in v.items()} for u, v in cut(m, PARAMS, PARAMS).items()}),
        "'float32' of the state is a PerRank inside a tree of shards, .* put the PerRank beside the tree",
    ),
    "AdamW's state for SGD": (optimizer_state(adamw, momentum), rf"\['momentum_buffer'\] of leaf 'a', {other_optimizer}"),
    "SGD's state for AdamW": (optimizer_state(momentum, adamw), rf"'exp_avg_sq', 'step'\] of leaf 'a', {other_optimizer}"),
    "AdamW's state for AMSGrad": (
        optimizer_state(adamw, amsgrad), rf"'max_exp_avg_sq', 'step'\] of leaf 'a', {other_optimizer}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("world", [4, GRID], ids=["4 shards", "2 x 2"])
@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_told_on_every_rank(misuse: str, world: int | Mapping[str, int], tmp_path: Path) -> None:
    use, words = MISUSES[misuse]

    def main(mesh: fs.Mesh) -> None:
        with pytest.raises((ValueError, TypeError), match=words):
            use(mesh, tmp_path / "checkpoint")

    fs.simulate(main, world)


def test_tied_leaves_that_are_equal_pass() -> None:
    for other in (W, W.clone()):
        for value in (W, torch.full((3,), float("nan"))):
            pair = {"a": value, "b": other if value is W else value.clone()}
            plan = fs.make_plan(TIED, 1)
            for shards in (fs.shard(pair, plan, fs.Mesh()), fs.from_state_dict(pair, plan, fs.Mesh())):
                torch.testing.assert_close(shards[""]["float32"], value, equal_nan=True)


@pytest.mark.parametrize("cls", [O.AdamW, O.NAdam, O.RMSprop, O.Adagrad, O.Rprop, O.ASGD, O.Adadelta, O.Adamax, O.RAdam])
def test_an_optimizer_takes_its_own_state(cls: type[O.Optimizer]) -> None:
    optimizer = fs.torch_optimizer(cls, lr=lambda step: 0.1)
    fs.simulate(lambda mesh: optimizer_state(optimizer, optimizer)(mesh, Path()), 2)
