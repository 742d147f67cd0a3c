"""Padding takes part in no number: poisoned with NaN, it changes no result of a public function.

An elementwise optimizer may leave anything in the padding of shards and of its state: with
``eps=0``, Adam divides zero by zero there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import funcshard as fs
from tests.states import equal

RANKS = 3
APPLY, PARAMS, BUFFERS = fs.make_functional(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
DATA = torch.arange(12.0).reshape(4, 3) / 7
ADAMW = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)


def planned(mesh: Any, **options: Any) -> fs.Plan:
    """Return a plan in which both units have padding on the last rank."""
    plan = fs.make_plan(PARAMS, mesh, units=["0", "2"], **options)
    assert all(buffer.padded_numel > buffer.numel for unit in plan.unit_list for buffer in unit.buffers)
    return plan


class Setting:
    """The trees of one rank, with NaN in all padding if ``poisoned``."""

    def __init__(self, mesh: fs.Mesh, folder: Path, poisoned: bool, **options: Any) -> None:
        self.mesh, self.folder, self.poisoned = mesh, folder, poisoned
        self.plan = planned(mesh, **options)
        self.shards = self.poison(fs.shard(PARAMS, self.plan, mesh))
        self.grads = self.poison({u: {k: x.cos() for k, x in own.items()} for u, own in self.shards.items()}, zero=True)
        self.step = fs.make_train_step(self.loss, ADAMW, self.plan, mesh)
        _, state = ADAMW.step(self.grads, ADAMW.init(self.shards), fs.copy(self.shards))
        self.opt_state = {"steps": state["steps"], "leaves": self.poison(state["leaves"], zero=True)}
        self.state = fs.TrainState(self.shards, BUFFERS, self.opt_state, 1)

    def loss(self, shards: Any, buffers: Any, batch: Any) -> Any:
        return fs.fully_shard(APPLY, self.plan, self.mesh)(shards, buffers, batch).square().mean()

    def poison(self, tree: Any, zero: bool = False) -> Any:
        """Write NaN, or first zeros, on the padding of a tree of shards, in place."""
        for unit in self.plan.unit_list:
            for buffer in unit.buffers:
                filled = buffer.filled(self.mesh.shard.rank)
                for x in optree.tree_leaves(tree[unit.name][buffer.key]):
                    if x.ndim:
                        x[filled:] = math.nan if self.poisoned else 0.0
        return tree

    def filled(self, tree: Any) -> Any:
        return {
            unit.name: {
                buffer.key: optree.tree_map(
                    lambda x, b=buffer: x[: b.filled(self.mesh.shard.rank)] if x.ndim else x, tree[unit.name][buffer.key]
                )
                for buffer in unit.buffers
            }
            for unit in self.plan.unit_list
        }


def saved(s: Setting) -> Any:
    path = s.folder / f"saved-{s.poisoned}"
    fs.save(path, s.state, s.plan, s.mesh)
    fs.restore(path).check()
    state = fs.restore(path, s.plan, s.mesh)
    return state.shards, state.opt_state["leaves"]  # with their padding, which is zero


def exported(s: Setting) -> Any:
    fs.export_safetensors(s.folder / f"exported-{s.poisoned}", s.shards, s.plan, s.mesh)
    return s.filled(fs.import_safetensors(s.folder / f"exported-{s.poisoned}", s.plan, s.mesh))


def stepped(s: Setting, optimizer: Any = ADAMW, **options: Any) -> Any:
    scaler = options.get("scaler")
    opt_state = s.opt_state if optimizer is ADAMW else optimizer.init(s.shards)
    state = s.state._replace(opt_state=opt_state, scaler=scaler.init(s.mesh) if scaler else None)
    state, metrics = fs.make_train_step(s.loss, optimizer, s.plan, s.mesh, **options)(state, DATA)
    return s.filled(state.shards), metrics


def hooked(s: Setting) -> Any:
    """Let a hook divide zero by zero on the padding of the gradients."""
    divide = lambda unit, key, partial: partial.div_(partial.abs().clamp(min=0.0 if s.poisoned else 1e-30))  # noqa: E731
    return stepped(s, on_reduce_scattered=divide, scaler=fs.GradScaler(), max_norm=1.0)


def clipped(s: Setting) -> Any:
    grads, norm = fs.clip_by_global_norm(s.grads, s.plan, s.mesh, 0.1)
    return s.filled(grads), norm


def pieces(s: Setting) -> Any:
    return {name: piece.tensor for name, piece in fs.to_state_dict(s.shards, s.plan, s.mesh, sharded=True).items()}


def muon(s: Setting) -> Any:
    optimizer = fs.muon(s.plan, s.mesh, lr=0.1)
    shards, state = optimizer.step(s.grads, optimizer.init(s.shards), s.shards)
    return s.filled(shards), fs.optimizer_to_state_dict(state, optimizer, s.plan, s.mesh)


def ema(s: Setting) -> Any:
    average = {u: {k: x.lerp(s.grads[u][k], 0.5) for k, x in own.items()} for u, own in s.shards.items()}
    return fs.gather(average, s.plan, s.mesh), fs.global_norm(average, s.plan, s.mesh)


def unscaled(s: Setting) -> Any:
    scaler = fs.GradScaler()
    found, found_inf = scaler.unscale(s.grads, scaler.init(s.mesh), s.mesh, plan=s.plan)
    return s.filled(found), found_inf


def traced(s: Setting) -> Any:
    step = fs.make_train_step(s.loss, ADAMW, s.plan, s.mesh, max_norm=1.0, scaler=fs.GradScaler())
    state = s.state._replace(scaler=fs.GradScaler().init(s.mesh))
    state, metrics = fs.trace(step, state, DATA)(state, DATA)
    return s.filled(state.shards), metrics


FUNCTIONS: dict[str, Callable[[Setting], Any]] = {
    "gather": lambda s: fs.gather(s.shards, s.plan, s.mesh),
    "gather of gradients": lambda s: fs.gather(s.grads, s.plan, s.mesh),
    "unshard": lambda s: fs.unshard(lambda leaves: leaves["weight"].sum(), s.plan.units["0"], s.mesh)(s.shards["0"]),
    "global_norm of shards": lambda s: fs.global_norm(s.shards, s.plan, s.mesh),
    "global_norm of gradients": lambda s: [fs.global_norm(s.grads, s.plan, s.mesh, p) for p in (1.0, 2.0, math.inf)],
    "clip_by_global_norm": clipped,
    "vdot": lambda s: fs.vdot(s.shards, s.grads, s.plan, s.mesh),
    "axpy": lambda s: s.filled(fs.axpy(0.5, s.shards, s.grads)),
    "randn_like": lambda s: fs.randn_like(s.shards, s.plan, s.mesh),
    "GradScaler.unscale": unscaled,
    "to_state_dict": lambda s: fs.to_state_dict(s.shards, s.plan, s.mesh),
    "to_state_dict, pieces": pieces,
    "optimizer_to_state_dict": lambda s: fs.optimizer_to_state_dict(s.opt_state, ADAMW, s.plan, s.mesh),
    "save and restore": saved,
    "export_safetensors": exported,
    "value_and_grad": lambda s: fs.value_and_grad(s.loss)(s.shards, BUFFERS, DATA),
    "make_train_step": stepped,
    "make_train_step, clipped and scaled": lambda s: stepped(s, max_norm=0.1, scaler=fs.GradScaler()),
    "make_train_step, SGD": lambda s: stepped(s, fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "make_train_step, a hook on the padding": hooked,
    "muon": muon,
    "an average": ema,
    "trace": traced,
}  # fmt: skip


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_nan_on_the_padding_changes_no_result(function: Callable[[Setting], Any], tmp_path: Path) -> None:
    if function is traced and torch.__version__ < "2.13":
        pytest.skip("torch crashes when a second thread traces")
    plain, poisoned = (
        fs.simulate(lambda mesh, p=p: function(Setting(mesh, tmp_path, p)), world_size=RANKS) for p in (False, True)
    )
    assert equal(plain, poisoned)
    assert not any(x.isnan().any() for x in optree.tree_leaves(plain) if isinstance(x, torch.Tensor))


def test_nan_on_the_padding_is_not_replanned(tmp_path: Path) -> None:
    found = []
    for poisoned in (False, True):
        states = fs.simulate(lambda mesh, p=poisoned: Setting(mesh, tmp_path, p).state, world_size=RANKS)
        found.append(fs.replan(states, planned(RANKS), fs.make_plan(PARAMS, 2)))
    assert equal(*found)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removesuffix(".Tensor"))
        return func(*args, **kwargs or {})


def test_a_norm_copies_no_shard_to_leave_its_padding_out() -> None:
    def main(mesh: fs.Mesh) -> Any:
        plan = planned(mesh)
        shards = fs.shard(PARAMS, plan, mesh)
        with Operations() as operations:
            fs.global_norm(shards, plan, mesh)
        return Counter(operations.names)

    first, *_, last = fs.simulate(main, world_size=RANKS)
    more = last - first
    # The rank that comes last runs the simulated all-gather: the parts of a result, and its copies.
    assert (more.pop("aten::copy_", 0), more.pop("aten::split", 0)) in ((0, 0), (2 * RANKS - 1, 1))
    assert set(more) == {"aten::slice"}  # views; the last rank has the padding
