"""Mistakes with state dicts and checkpoints of several ranks: every rank tells."""

from collections.abc import Callable
from typing import Any

import torch

import funcshard as fs
from tests.misuse import EVERYWHERE, GRID, Table, clone, right
from tests.misuse.checkpoints import new

CASES = Table(worlds=EVERYWHERE)
O = torch.optim  # noqa: E741
W, NAN = torch.arange(3.0), torch.full((3,), float("nan"))
PARAMS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(3, 2) + 10}
HALF = {name: value.half() for name, value in PARAMS.items()}
TURNED = {name: value.t().contiguous() for name, value in PARAMS.items()}
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


def on_another_mesh(use: Callable[..., Any]) -> Callable[[fs.Mesh], Any]:
    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(PARAMS, mesh)
        other = mesh.reshaped(GRID if mesh.replicate.size == 1 else {"shard": 4})
        return use(fs.shard(PARAMS, plan, mesh), plan, other)

    return main


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


adamw, amsgrad = fs.torch_optimizer(O.AdamW), fs.torch_optimizer(O.AdamW, amsgrad=True)
momentum = fs.torch_optimizer(O.SGD, lr=0.1, momentum=0.9)
other_mesh = "the plan was made for a mesh of…ranks; found …: make the plan with make_plan(params, mesh)"
asked = "must be the same on every rank; rank 0 has"
other_optimizer = "as this optimizer keeps; found…: it is of another optimizer, or of other options; make the optimizer as"

CASES += [
    ("gather", "gather on another mesh", ValueError(other_mesh), on_another_mesh(fs.gather)),
    ("to_state_dict", "to_state_dict on another mesh", ValueError(other_mesh), on_another_mesh(fs.to_state_dict)),
    ("export_safetensors", "export on another mesh", ValueError(other_mesh),
     on_another_mesh(lambda s, plan, mesh: fs.export_safetensors("x", s, plan, mesh))),
    ("shard", "a plan of other dtypes", ValueError("dtype float16, as planned;…or make a new plan"),
     lambda mesh: cut(mesh, PARAMS, HALF)),
    ("shard", "a plan of other shapes", ValueError("must have shape (3, 2)…found (2, 3)"),
     lambda mesh: cut(mesh, PARAMS, TURNED)),
    ("from_state_dict", "a state dict of other shapes", ValueError("must have shape (2, 3)…or make a new plan"),
     lambda mesh: loaded(mesh, TURNED)),
    ("from_state_dict", "a state dict of other dtypes", ValueError("dtype float32, as planned;…or make a new plan"),
     lambda mesh: loaded(mesh, HALF)),
    ("shard", "src differs", ValueError(f"options of shard {asked} src=0…rank 1 has src=1"),
     lambda mesh: cut(mesh, PARAMS, PARAMS, src=mesh.rank)),
    ("from_state_dict", "src on some ranks", ValueError(f"of from_state_dict {asked} src=None…1 has src=0"),
     lambda mesh: loaded(mesh, PARAMS, src=0 if mesh.rank else None)),
    ("from_state_dict", "src and pieces", ValueError("src the state dict must hold full tensors,…leave src out"),
     lambda mesh: loaded(mesh, whole(mesh, sharded=True), src=0)),
    ("from_state_dict", "the state dict of rank 0 on every rank",
     ValueError("it is empty, as rank0_only=True leaves it…pass src=0"),
     lambda mesh: loaded(mesh, whole(mesh, rank0_only=True))),
    ("to_state_dict", "rank0_only differs", ValueError(f"of to_state_dict {asked} rank0_only=False"),
     lambda mesh: whole(mesh, rank0_only=mesh.rank > 0)),
    ("to_state_dict", "sharded differs", ValueError(f"of to_state_dict {asked} rank0_only=False"),
     lambda mesh: whole(mesh, sharded=mesh.rank > 0)),
    ("from_state_dict", "pieces under another plan",
     ValueError("pieces of leaf…must cover…pass the pieces of all ranks"),
     lambda mesh: fs.from_state_dict(whole(mesh, sharded=True), fs.make_plan(PARAMS, mesh, units=["b"]), mesh)),
    ("shard", "params no longer tied", ValueError("'a' and 'b' of params are one leaf under the plan,…tie them, or"),
     lambda mesh: cut(mesh, {"a": W, "b": W * 2}, TIED)),
    ("from_state_dict", "a state dict no longer tied", ValueError("'a' and 'b' of the state dict are one leaf…a new plan"),
     lambda mesh: loaded(mesh, {"a": W, "b": W * 2}, TIED)),
    ("restore", "a checkpoint of other shapes", ValueError("leaf 'a' has shape…is of another model"),
     lambda mesh: restored(mesh, TURNED)),
    ("restore", "a checkpoint of other dtypes", ValueError("in float32, and leaf 'a' is of float16"),
     lambda mesh: restored(mesh, HALF)),
    ("restore", "a checkpoint of other names", ValueError("holds the first but not the second"),
     lambda mesh: restored(mesh, {"a": PARAMS["a"], "c": PARAMS["b"]})),
    ("restore", "a checkpoint of more leaves",
     ValueError("leaf 'b' of the state is not in the plan: the plan is of another"),
     lambda mesh: restored(mesh, {"a": PARAMS["a"]})),
    ("restore gather", "a checkpoint of fewer leaves", ValueError("the shard of unit 'c' must hold the buffers"),
     lambda mesh: restored(mesh, {**PARAMS, "c": W}, units=["c"])),
    ("restore", "a checkpoint without local leaves", ValueError("is local to ranks under only one of the two plans"),
     lambda mesh: restored(mesh, PARAMS, local=["a"])),
    ("save PerRank", "a number without PerRank", ValueError("'at' of the state is 0 on rank 0…PerRank"),
     lambda mesh: saved(mesh, {"at": mesh.rank})),
    ("save PerRank", "a tensor without PerRank", ValueError("tensor 'rng' of the state is not the same…PerRank"),
     lambda mesh: saved(mesh, {"rng": torch.tensor(mesh.rank)})),
    ("save PerRank", "PerRank in a tree of shards",
     TypeError("'float32' of the state is a PerRank inside a tree of shards,…put the PerRank beside the tree"),
     lambda mesh: saved(mesh, {u: {k: fs.PerRank(s) for k, s in v.items()} for u, v in cut(mesh, PARAMS, PARAMS).items()})),
    ("optimizer_from_state_dict", "AdamW's state for SGD", ValueError(f"['momentum_buffer'] of leaf 'a', {other_optimizer}"),
     optimizer_state(adamw, momentum)),
    ("optimizer_from_state_dict", "SGD's state for AdamW",
     ValueError(f"'exp_avg_sq', 'step'] of leaf 'a', {other_optimizer}"),
     optimizer_state(momentum, adamw)),
    ("optimizer_from_state_dict", "AdamW's state for AMSGrad",
     ValueError(f"'max_exp_avg_sq', 'step'] of leaf 'a', {other_optimizer}"),
     optimizer_state(adamw, amsgrad)),
    *[("optimizer_from_state_dict", f"{cls.__name__} takes its own state", right("taken"), takes_its_own(cls))
      for cls in (O.AdamW, O.NAdam, O.RMSprop, O.Adagrad, O.Rprop, O.ASGD, O.Adadelta, O.Adamax, O.RAdam)],
    ("shard from_state_dict", "tied leaves of equal values, or both nan", right([W, W, NAN, NAN]),
     lambda mesh: [uncut(mesh, {"a": value, "b": value.clone()}, load) for value in (W, NAN) for load in (cut, loaded)]),
]  # fmt: skip
