"""Programs that run dry on files: checkpoints, saved at once and meanwhile, and safetensors."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

import funcshard as fs
from benchmarks.dry.mode import current_mode, is_dry
from benchmarks.dry.steps import Net, batch_of, check_placed, check_state, train
from benchmarks.dry.stream_order import StreamOrder
from funcshard.checkpoint import safetensors
from funcshard.checkpoint.writer import WriterThread

__all__ = ["as_safetensors", "cut_again", "save_and_restore"]


@contextlib.contextmanager
def written_as_zeros() -> Iterator[None]:
    """Let checkpoints be saved without data, by threads that run dry and end when they have started.

    It does nothing if this thread does not run dry.
    """
    if not is_dry():
        yield
        return
    modes, run, start = _get_current_dispatch_mode_stack(), WriterThread.run, WriterThread.start

    def inside(thread: WriterThread) -> None:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
                if isinstance(mode, StreamOrder):
                    stack.enter_context(mode.new_thread())
            run(thread)

    def to_the_end(thread: WriterThread) -> None:
        start(thread)
        thread.join()

    threads = unittest.mock.patch.multiple(WriterThread, run=inside, start=to_the_end)
    # Why zero: a broadcast moves no values, so it leaves the token of a save a zero.
    token = unittest.mock.patch.object(secrets, "randbits", return_value=0)
    with threads, token, unittest.mock.patch("torch.frombuffer", _zeros):
        yield


def _zeros(buffer: Any, *, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without data in place of one that lies in a buffer, which keeps its zeros."""
    return torch.zeros(len(buffer), dtype=dtype)


def save_and_restore(mesh: fs.Mesh, **options: Any) -> None:
    """Save a training state, at once and while training goes on; restore it, and train on.

    All of it runs on a stream other than the default one, which is that of the threads that save.
    """
    with _another_stream(mesh):
        run, state = train(mesh, **options)
        kept = {"train": state, "ema": fs.copy(state.shards), "own": fs.PerRank(batch_of(mesh)), "epoch": 3}
        with tempfile.TemporaryDirectory(prefix="dry-") as folder, written_as_zeros():
            fs.save(f"{folder}/1", kept, run.plan, mesh)
            saving = fs.save(f"{folder}/2", kept, run.plan, mesh, wait=False, keep=1)
            run.step(state, batch_of(mesh))
            saving.wait()
            found = fs.latest(folder)
            assert found is not None, "no checkpoint is complete"
            str(fs.restore(found))
            back = fs.restore(found, run.plan, mesh)
        state, metrics = run.step(back["train"], batch_of(mesh))
        check_state(run, state, metrics)
        assert back["own"].value.device == mesh.device, "the batch left the device"


def _another_stream(mesh: fs.Mesh) -> Any:
    if is_dry():
        return current_mode(StreamOrder).stream("side")
    return torch.cuda.stream(torch.cuda.Stream()) if mesh.device.type == "cuda" else contextlib.nullcontext()


def cut_again(mesh: fs.Mesh, **options: Any) -> None:
    """Restore a training state under a plan with other units and offload, and cut the states of ranks again."""
    run, state = train(mesh, **options)
    params = fs.gather(state.shards, run.plan, mesh)
    other = fs.make_plan(params, mesh, units={"embed": {"offload": True}})
    with tempfile.TemporaryDirectory(prefix="dry-") as folder, written_as_zeros():
        fs.save(f"{folder}/1", state, run.plan, mesh)
        check_placed(fs.restore(f"{folder}/1", other, mesh).shards, other, mesh)
    (found,) = fs.replan([state], run.plan, other)
    check_placed(found.shards, other, mesh)


def as_safetensors(mesh: fs.Mesh, **options: Any) -> None:
    """Export parameters, and import a file as Hugging Face writes it."""
    run, state = train(mesh, **options)

    def write(file: Any, entries: Any, tensors: Any, metadata: Any) -> None:
        for entry in entries:
            tensor = next(tensors).detach().cpu()
            assert tensor.numel() * tensor.itemsize == entry.nbytes, f"{entry.name} has {tensor.numel()} elements"

    with tempfile.TemporaryDirectory(prefix="dry-") as folder:
        with _replaced("_write_one", write):
            fs.export_safetensors(folder, state.shards, run.plan, mesh, max_shard_size=500)
        with _disable_current_modes():  # a file with values
            alone, params = fs.Mesh(), fs.make_functional(Net())[1]
            plan = fs.make_plan(params, alone)
            fs.export_safetensors(folder, fs.shard(params, plan, alone), plan, alone)
        with _replaced("_open", _opened):
            check_placed(fs.import_safetensors(folder, run.plan, mesh), run.plan, mesh)


def _replaced(name: str, function: Any) -> Any:
    return unittest.mock.patch.object(safetensors, name, function) if is_dry() else contextlib.nullcontext()


def _opened(file: Path, token: str | None) -> dict[str, torch.Tensor]:
    """Return tensors without data like those of a file."""
    with _disable_current_modes():
        found = _open(file, token)
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in found.items()}


_open = safetensors._open
