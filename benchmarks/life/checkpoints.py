"""Checkpoints of parameters and AdamW's state: saved, restored, and saved while training goes on.

Both sides sync every file to the disk before a save counts as done. Ours also syncs folders, checks
that ranks agree, writes checksums, and publishes the checkpoint with one rename; DCP does none of
these. Before a restore, both sides' files leave the page cache, as on the machine of a new job.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.models import adamw, adamw_by_fsdp2, adamw_by_funcshard, sample

__all__ = ["CASES"]

_MILLIONS = 51
_LEAST_STEPS = 3  # beside a background save, and without one


@dataclass(slots=True)
class _Ours:
    """A model that is sharded by funcshard, with AdamW's state."""

    mesh: Any
    plan: Any
    step: Any
    state: Any
    batch: Any

    def save(self, path: Path, **options: Any) -> Any:
        import funcshard as fs

        return fs.save(path, self.state, self.plan, self.mesh, **options)

    def restore(self, path: Path) -> None:
        import funcshard as fs

        self.state = fs.restore(path, self.plan, self.mesh)

    def train(self) -> None:
        self.state, _ = self.step(self.state, self.batch)

    def clear(self) -> None:
        """Forget the state, as a new process has none."""
        self.state = None

    def tensors(self) -> list[torch.Tensor]:
        import optree

        leaves = optree.tree_leaves((self.state.shards, self.state.opt_state))  # type: ignore[arg-type]
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]


def _ours(place: Place) -> _Ours:
    import funcshard as fs

    own = adamw_by_funcshard(_MILLIONS, place)
    sharded = fs.fully_shard(own.apply, own.plan, own.mesh)
    loss_fn = lambda shards, buffers, batch: _loss(sharded(shards, buffers, batch[0]), batch[1])  # noqa: E731
    step = fs.make_train_step(loss_fn, own.optimizer, own.plan, own.mesh)
    state = step.init(own.shards, own.buffers)._replace(opt_state=own.opt_state)
    return _Ours(own.mesh, own.plan, step, state, sample(_MILLIONS, place, 2))


@dataclass(slots=True)
class _Theirs:
    """The same model, sharded by FSDP2."""

    module: Any
    optimizer: Any
    batch: Any
    group: Any
    stager: Any

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path, *, wait: bool = True) -> Any:
        import torch.distributed.checkpoint as dcp

        if wait:
            return dcp.save(self.state_dict(), checkpoint_id=path)
        # A group of its own, because its collectives run beside those of training; and a stager
        # that is kept, because it uses its memory again.
        return dcp.async_save(self.state_dict(), checkpoint_id=path, process_group=self.group, async_stager=self.stager)

    def restore(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        found = self.state_dict()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(self.module, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    def train(self) -> None:
        _loss(self.module(self.batch[0]), self.batch[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clear(self) -> None:
        """Clear the parameters, and forget the optimizer's state, as a new process has none."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.zero_()
        self.optimizer = adamw(self.module)

    def tensors(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[parameter] for parameter in self.module.parameters()]
        found = [*self.module.parameters(), *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))]
        return [tensor.to_local() for tensor in found]


def _theirs(place: Place) -> _Theirs:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    module, optimizer = adamw_by_fsdp2(_MILLIONS, place)
    stager = DefaultStager(StagingOptions(False, False, False, False))  # the others need CUDA
    return _Theirs(module, optimizer, sample(_MILLIONS, place, 2), dist.new_group(), stager)


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def _bits(side: _Ours | _Theirs) -> int:
    """Return a sum over the bits of parameters and optimizer state, which no cut changes."""
    total = torch.tensor(sum(int(tensor.detach().view(torch.int32).sum(dtype=torch.int64)) for tensor in side.tensors()))
    dist.all_reduce(total)
    return int(total)


_Make = Callable[[Place], Any]
_SIDES: dict[str, _Make] = {"ours": _ours, "theirs": _theirs}


def _end(saving: Any) -> None:
    """Wait until a save in the background is complete."""
    saving.wait() if hasattr(saving, "wait") else saving.result()


def _remove(place: Place, path: Path) -> None:
    dist.barrier()
    if place.rank == 0:
        shutil.rmtree(path)
        os.sync()  # so that the other side's turn begins with an idle disk
    dist.barrier()


def _saving(name: str, wait: bool) -> _Make:
    def make(place: Place) -> Turn:
        side, last = _SIDES[name](place), None

        def turn() -> int:
            nonlocal last
            path = place.directory / f"{name}-saved"
            options = {} if wait else {"wait": False}
            if name == "ours" and last is not None:
                options["after"] = last
            with place.timed():
                saving = side.save(path, **options)
            if not wait:
                _end(saving)
                last = saving
            _remove(place, path)
            return _bits(side)

        return turn

    return make


def _restoring(name: str) -> _Make:
    def make(place: Place) -> Turn:
        side = _SIDES[name](place)

        def turn() -> int:
            side.clear()
            path = place.directory / name
            _forget_pages(path)
            with place.timed():
                side.restore(path)
            return _bits(side)

        return turn

    return make


def _forget_pages(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        with contextlib.suppress(AttributeError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _save_both(place: Place) -> None:
    for name, make in _SIDES.items():
        make(place).save(place.directory / name)


def _stepping(name: str, beside: bool) -> _Make:
    def make(place: Place) -> Turn:
        side = _SIDES[name](place)

        def turn() -> None:
            path = place.directory / f"{name}-{beside}"
            saving = side.save(path, wait=False) if beside else None
            done, steps = False, 0
            while not done:
                dist.barrier()
                start, worked = time.perf_counter(), time.process_time()
                side.train()
                place.record(time.perf_counter() - start, time.process_time() - worked)
                steps += 1
                going = torch.tensor(int(saving is not None and not _done(saving)))
                dist.all_reduce(going)
                done = not going if beside else steps == _LEAST_STEPS
            place.record(place.seconds / steps - place.seconds, place.processor / steps - place.processor)
            if saving is not None:
                _end(saving)
                _remove(place, path)

        return turn

    return make


def _done(saving: Any) -> bool:
    return bool(saving.done() if callable(saving.done) else saving.done)


def _race(name: str, title: str, make: Callable[[str], _Make], **options: Any) -> Case:
    return Case(name, title, "DCP on FSDP2", 0.7, make("ours"), make("theirs"), **options)


CASES = (
    _race("save", "save parameters and AdamW, 51 M", lambda name: _saving(name, True)),
    _race("save-async", "save in the background, until training goes on", lambda name: _saving(name, False)),
    _race("restore", "restore", _restoring, before=_save_both),
    _race("restore-fewer", "restore on 2 ranks from 4", _restoring, before=_save_both, before_ranks=4),
    _race("restore-more", "restore on 4 ranks from 2", _restoring, ranks=(4,), before=_save_both, before_ranks=2),
    Case(
        "step-beside-save", "a step beside a save in the background", "the same step without a save", 1.1,
        _stepping("ours", True), _stepping("ours", False), most_rounds=4,
    ),
    Case(
        "step-beside-dcp", "FSDP2's step beside DCP's save in the background", "the same step without a save", None,
        _stepping("theirs", True), _stepping("theirs", False), most_rounds=4,
    ),
)  # fmt: skip
