"""State dicts and checkpoints of parameters and AdamW: taken, saved, restored, saved beside training.

Both sides sync every file to the disk before a save counts as done. Ours also syncs folders, checks
that ranks agree, writes checksums, and publishes the checkpoint with one rename; DCP does none of
these. Before a restore, both sides' files leave the page cache, as on the machine of a new job.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import funcshard as fs
from benchmarks.life import sides
from benchmarks.life.case import Case, Place, Turn

_MILLIONS = 51
_LEAST_STEPS = 3  # beside a background save, and without one
_Make = Callable[[Place], Any]


class _Ours(sides.Ours):
    """The model after an update with gradients of one."""

    def __init__(self, place: Place) -> None:
        super().__init__(sides.gpt(place, _MILLIONS, batch=2))
        self.prepare(ones=True)

    def take(self, optimizer: bool, sharded: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"sharded": True} if sharded else {"rank0_only": True, "offload": True}
        if optimizer:
            return fs.optimizer_to_state_dict(self.state.opt_state, self.optimizer, self.plan, self.mesh, **options)
        return fs.to_state_dict(self.state.shards, self.plan, self.mesh, **options)

    def save(self, path: Path, **options: Any) -> Any:
        return fs.save(path, self.state, self.plan, self.mesh, **options)

    def restore(self, path: Path) -> None:
        self.state = fs.restore(path, self.plan, self.mesh)

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return fs.iter_params(self.state.shards, self.plan, self.mesh, dtype=torch.bfloat16)

    def clear(self) -> None:
        """Forget the state, as a new process has none."""
        self.state = None

    def tensors(self) -> list[torch.Tensor]:
        tensors = torch.utils._pytree.tree_leaves((self.state.shards, self.state.opt_state))
        return [leaf for leaf in tensors if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]


class _Theirs(sides.Theirs):
    """The same model, sharded by FSDP2."""

    def __init__(self, place: Place) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(sides.gpt(place, _MILLIONS, batch=2))
        self.update_with_ones()
        # A group of its own, because its collectives run beside those of training; and a stager
        # that is kept, because it uses its memory again.
        self.group = dist.new_group()
        self.stager = DefaultStager(StagingOptions(False, False, False, False))  # the others need CUDA

    def take(self, optimizer: bool, sharded: bool) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        options = StateDictOptions() if sharded else StateDictOptions(full_state_dict=True, cpu_offload=True)
        if optimizer:
            return get_optimizer_state_dict(self.module, self.optimizer, options=options)
        return get_model_state_dict(self.module, options=options)

    def _state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path, *, wait: bool = True) -> Any:
        import torch.distributed.checkpoint as dcp

        if wait:
            return dcp.save(self._state_dict(), checkpoint_id=path)
        options: dict[str, Any] = {"process_group": self.group, "async_stager": self.stager}
        return dcp.async_save(self._state_dict(), checkpoint_id=path, **options)

    def restore(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        found = self._state_dict()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(self.module, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ((name, leaf.full_tensor().bfloat16()) for name, leaf in self.module.named_parameters())

    def clear(self) -> None:
        """Clear the parameters, and forget the optimizer's state, as a new process has none."""
        with torch.no_grad():
            for parameter in self.params:
                parameter.zero_()
        self.optimizer = self.new_optimizer()

    def tensors(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[parameter] for parameter in self.params]
        found = [*self.params, *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))]
        return [tensor.to_local() for tensor in found]


_SIDES: dict[str, _Make] = {"ours": _Ours, "theirs": _Theirs}


# --- state dicts ----------------------------------------------------------------------------------


def _taking(optimizer: bool, sharded: bool) -> Callable[[str], _Make]:
    def check(found: dict[str, Any]) -> float | None:
        if sharded:  # the two sides cut leaves in different places
            return None
        tensors = {f"{name}.{key}": value for name, own in found.get("state", {}).items() for key, value in own.items()}
        tensors = tensors or {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        return sum(float(value.double().norm()) for name, value in tensors.items() if "head." not in name)

    def make(name: str, place: Place) -> Turn:
        side = _SIDES[name](place)
        return place.turn(lambda: side.take(optimizer, sharded), check)

    return lambda name: partial(make, name)


def _loading_engine(name: str) -> _Make:
    """Copy whole bfloat16 parameters into the memory of an inference engine."""

    def make(place: Place) -> Turn:
        side = _SIDES[name](place)
        engine = {name: torch.empty_like(tensor) for name, tensor in side.weights()}

        def load() -> None:
            for name, tensor in side.weights():
                engine[name].copy_(tensor)

        return place.turn(load, lambda _: sum(float(tensor.double().norm()) for tensor in engine.values()))

    return make


# --- checkpoints ----------------------------------------------------------------------------------


def _bits(side: Any) -> int:
    """Return a sum over the bits of parameters and optimizer state, which no cut changes."""
    total = torch.tensor(sum(int(tensor.detach().view(torch.int32).sum(dtype=torch.int64)) for tensor in side.tensors()))
    dist.all_reduce(total)
    return int(total)


def _end(saving: Any) -> None:
    """Wait until a save in the background is complete."""
    saving.wait() if hasattr(saving, "wait") else saving.result()


def _remove(place: Place, path: Path) -> None:
    dist.barrier()
    if place.rank == 0:
        shutil.rmtree(path)
        os.sync()  # so that the other side's turn begins with an idle disk
    dist.barrier()


def _saving(name: str, **options: Any) -> _Make:
    def make(place: Place) -> Turn:
        side, path = _SIDES[name](place), place.directory / f"{name}-saved"
        further = dict(options)

        def turn() -> int:
            with place.timed():
                saving = side.save(path, **further)
            if options:
                _end(saving)
                if name == "ours":
                    further["after"] = saving
            _remove(place, path)
            return _bits(side)

        return turn

    return make


def _restoring(name: str) -> _Make:
    def make(place: Place) -> Turn:
        side, path = _SIDES[name](place), place.directory / name

        def turn() -> int:
            side.clear()
            for part in path.iterdir():  # take it out of the page cache
                file = os.open(part, os.O_RDONLY)
                with contextlib.suppress(AttributeError):
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
            with place.timed():
                side.restore(path)
            return _bits(side)

        return turn

    return make


def _save_both(place: Place) -> None:
    for name, make in _SIDES.items():
        make(place).save(place.directory / name)


def _stepping(beside: bool) -> _Make:
    """Take steps of ours while a save runs in the background, or without one."""

    def make(place: Place) -> Turn:
        side, path = _Ours(place), place.directory / f"ours-{beside}"
        batch = side.shape.batches(place.rank)[0]

        def turn() -> None:
            saving = side.save(path, wait=False) if beside else None
            done, steps = False, 0
            while not done:
                dist.barrier()
                start, worked = time.perf_counter(), time.process_time()
                side.train(batch)
                place.record(time.perf_counter() - start, time.process_time() - worked)
                steps += 1
                going = torch.tensor(int(saving is not None and not saving.done))
                dist.all_reduce(going)
                done = not going if beside else steps == _LEAST_STEPS
            place.record(place.seconds / steps - place.seconds, place.processor / steps - place.processor)
            if saving is not None:
                _end(saving)
                _remove(place, path)

        return turn

    return make


def _race(name: str, title: str, make: Callable[[str], _Make], peer: str = "DCP on FSDP2", **options: Any) -> Case:
    return Case(name, title, peer, 0.7, make("ours"), make("theirs"), **options)


CASES = (
    _race("state", "full state dict on rank 0, GPT, 51 M", _taking(False, False), "FSDP2"),
    _race("state-sharded", "sharded state dict, GPT, 51 M", _taking(False, True), "FSDP2"),
    _race("optimizer-state", "AdamW's state by name on rank 0, GPT, 51 M", _taking(True, False), "FSDP2"),
    _race("optimizer-state-sharded", "AdamW's state by name, sharded, GPT, 51 M", _taking(True, True), "FSDP2"),
    _race("engine", "whole bfloat16 parameters for an inference engine, 51 M", _loading_engine, "FSDP2's full_tensor"),
    _race("save", "save parameters and AdamW, 51 M", _saving),
    _race("save-async", "save in the background, until training goes on", lambda name: _saving(name, wait=False)),
    _race("restore", "restore", _restoring, before=_save_both),
    _race("restore-fewer", "restore on 2 ranks from 4", _restoring, before=_save_both, before_ranks=4),
    _race("restore-more", "restore on 4 ranks from 2", _restoring, ranks=(4,), before=_save_both, before_ranks=2),
    Case(
        "step-beside-save", "a step beside a save in the background", "the same step without a save", 1.1,
        _stepping(True), _stepping(False),
    ),
)  # fmt: skip
