"""Mistakes with state dicts and checkpoints of several ranks: every rank tells."""

from collections.abc import Callable
from typing import Any

import torch

import funcshard as fs
from tests.misuse import EVERYWHERE, Table, clone, right
from tests.misuse.checkpoints import new

CASES = Table(worlds=EVERYWHERE)
O = torch.optim  # noqa: E741
W, NAN = torch.arange(3.0), torch.full((3,), float("nan"))
PARAMS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(3, 2) + 10}
TIED = {"a": W, "b": W}


def saved(mesh: fs.Mesh, state: Any) -> Any:
    path = new(mesh)
    fs.save(path, state, fs.make_plan(PARAMS, mesh), mesh)
    return path


def restored(mesh: fs.Mesh, other: Any, **options: Any) -> Any:
    plan = fs.make_plan(PARAMS, mesh)
    path = saved(mesh, {"s": fs.shard(PARAMS, plan, mesh)})
    other_plan = fs.make_plan(other, mesh, **options)
    return fs.gather(fs.restore(path, other_plan, mesh)["s"], other_plan, mesh)


def whole(mesh: fs.Mesh, **options: Any) -> Any:
    plan = fs.make_plan(PARAMS, mesh)
    return fs.to_state_dict(fs.shard(PARAMS, plan, mesh), plan, mesh, **options)


def loaded(mesh: fs.Mesh, state_dict: Any, params: Any = PARAMS, **options: Any) -> Any:
    return fs.from_state_dict(state_dict, fs.make_plan(params, mesh), mesh, **options)


def cut(mesh: fs.Mesh, params: Any, plan_of: Any, **options: Any) -> Any:
    return fs.shard(params, fs.make_plan(plan_of, mesh), mesh, **options)


def optimizer_state(then: Any, now: Any) -> Callable[[fs.Mesh], Any]:
    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(PARAMS, mesh)
        shards = fs.shard(PARAMS, plan, mesh)
        _, state = then.step(clone(shards), then.init(shards), shards)
        by_name = fs.optimizer_to_state_dict(state, then, plan, mesh)
        return fs.optimizer_from_state_dict(by_name, now, plan, mesh)

    return main


def takes_its_own(cls: type[O.Optimizer]) -> Callable[[fs.Mesh], str]:
    optimizer = fs.torch_optimizer(cls, lr=lambda step: 0.1)
    return lambda mesh: optimizer_state(optimizer, optimizer)(mesh) and "taken"


def uncut(mesh: fs.Mesh, params: Any, load: Any) -> torch.Tensor:
    return fs.gather(load(mesh, params, TIED), fs.make_plan(TIED, mesh), mesh)["b"]


CASES += [
    ("from_state_dict", "src and pieces", ValueError("src the state dict must hold full tensors,…leave src out"),
     lambda mesh: loaded(mesh, whole(mesh, sharded=True), src=0)),
    ("shard", "params no longer tied", ValueError("'a' and 'b' of params are one leaf under the plan,…tie them, or"),
     lambda mesh: cut(mesh, {"a": W, "b": W * 2}, TIED)),
    ("from_state_dict", "a state dict no longer tied", ValueError("'a' and 'b' of the state dict are one leaf…a new plan"),
     lambda mesh: loaded(mesh, {"a": W, "b": W * 2}, TIED)),
    ("restore", "a checkpoint of other names", ValueError("leaf 'c' of the plan is not in checkpoint"),
     lambda mesh: restored(mesh, {"a": PARAMS["a"], "c": PARAMS["b"]})),
    ("save PerRank", "a tensor without PerRank", ValueError("tensor 'rng' of the state must be the same…PerRank"),
     lambda mesh: saved(mesh, {"rng": torch.tensor(mesh.rank)})),
    ("save PerRank", "PerRank in a tree of shards",
     TypeError("'float32' of the state is a PerRank inside a tree of shards,…put the PerRank beside the tree"),
     lambda mesh: saved(mesh, {u: {k: fs.PerRank(s) for k, s in v.items()} for u, v in cut(mesh, PARAMS, PARAMS).items()})),
    *[("optimizer_from_state_dict", f"{cls.__name__} takes its own state", right("taken"), takes_its_own(cls))
      for cls in (O.AdamW, O.NAdam, O.RMSprop, O.Adagrad, O.Rprop, O.ASGD, O.Adadelta, O.Adamax, O.RAdam)],
    ("shard from_state_dict", "tied leaves of equal values, or both nan", right([W, W, NAN, NAN]),
     lambda mesh: [uncut(mesh, {"a": value, "b": value.clone()}, load) for value in (W, NAN) for load in (cut, loaded)]),
]  # fmt: skip
