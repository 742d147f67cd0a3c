"""Collectives run late, and freed memory is overwritten: steps keep their bits, and the host doesn't wait.

A GPU's allocator gives the memory of a freed tensor to the next tensor of the same stream, though
another stream may still read it. The values mostly stay there, so you don't notice a missing wait.
Here NaN overwrites them, in the order of the stream that allocated the memory. Without a GPU a
collective reads and writes when it's waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import funcshard as fs
from benchmarks.dry.steps import batch_of, made
from benchmarks.fake_ranks import FakeGroup
from funcshard._utils.tree import tensors_in
from funcshard.comm import DONE, DeferredWork, Op, Work
from tests.promises.test_cuda import no_waiting_host
from tests.states import equal

ON_CUDA = torch.cuda.is_available()
CYCLES = 2_000_000  # of the device's clock: about a millisecond
WAYS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "shard_grad_op": {"plan": {"strategy": "shard_grad_op"}},
    "buckets": {"plan": {"bucket_bytes": 1 << 12}},
    "offload": {"plan": {"offload": True}},
    "bfloat16": {"plan": {"precision": fs.MixedPrecision(torch.bfloat16, torch.float32)}},
    "remat, clipped": {"remat": ("blocks.0", "blocks.1"), "max_norm": 1.0},
    "micro-batches": {"accumulate": 2, "reduce": "once"},
}


@dataclass(frozen=True, slots=True)
class LateGroup(FakeGroup):
    """One rank of a group, without the others, whose collectives run late.

    Attributes:
        stream: the stream of the collectives; ``None`` on the CPU.
        waits: whether a collective keeps its tensors and is waited for. ``False`` is a mistake.
    """

    stream: Any = None
    waits: bool = True

    def start(self, op: Op) -> Work:
        if op.kind == "all_gather_text":
            return FakeGroup.start(self, op)
        data = self.sent(op)
        finish = functools.partial(self.run, op, data)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(CYCLES)
                self.run(op, data)
            finish = functools.partial(self.wait_for, self.stream.record_event(), op, data)
        return DeferredWork(finish) if self.waits else DONE

    def run(self, op: Op, data: Any) -> None:
        self.move(op, data)
        if data is None:  # it reads and writes one tensor
            op.out.copy_(op.out.clone())

    def wait_for(self, end: Any, *held: Any) -> None:
        torch.cuda.current_stream().wait_event(end)


def late_mesh(**options: Any) -> fs.Mesh:
    """Return the mesh of rank 0 of 2, on the GPU if there is one."""
    stream = torch.cuda.Stream() if ON_CUDA else None
    device = torch.device("cuda", 0) if ON_CUDA else torch.device("cpu")
    return fs.Mesh({"shard": LateGroup(0, 2, stream=stream, **options)}, device)


class Poison(TorchDispatchMode):
    """Overwrite the memory of each tensor when it ends; ``freed`` counts them."""

    def __init__(self, device: str = "cuda" if ON_CUDA else "cpu") -> None:
        super().__init__()
        self.freed, self._device, self._active = 0, device, True
        self._known: set[int] = set()
        self._driver = ctypes.CDLL("libcuda.so.1") if device == "cuda" else None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._active = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if tensor.device.type == self._device and size and address not in self._known:
                self._known.add(address)
                stream = torch.cuda.current_stream().cuda_stream if self._driver else 0
                # Why a finalizer: it runs just before the allocator gets the memory back.
                weakref.finalize(storage, self._end, address, size, stream).atexit = False
        return out

    def _end(self, address: int, size: int, stream: int) -> None:
        self._known.discard(address)
        if not self._active:
            return
        self.freed += 1
        if self._driver is None:
            ctypes.memset(address, 255, size)  # NaN in every dtype
            return
        code = self._driver.cuMemsetD8Async(
            ctypes.c_uint64(address), ctypes.c_ubyte(255), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        )
        assert code == 0, f"cuMemsetD8Async ended with code {code}"


def bits_of(mesh: fs.Mesh, mode: contextlib.AbstractContextManager[Any], **options: Any) -> list[torch.Tensor]:
    """Return the losses and the shards of three steps."""
    run = made(mesh, **options)
    state, losses = run.state, []
    with mode:
        for _ in range(3):
            state, metrics = run.step(state, batch_of(mesh))
            losses.append(metrics["loss"])
    if ON_CUDA:
        torch.cuda.synchronize()
    return [tensor.detach().cpu() for tensor in (*losses, *tensors_in(state.shards))]


def test_freed_memory_is_overwritten_before_it_is_used_again() -> None:
    memory = np.ones(1000, dtype=np.float32)
    with Poison("cpu") as mode:
        tensor = torch.from_numpy(memory).detach()
        kept = tensor + 1
        del tensor
    assert mode.freed == 1
    assert np.isnan(memory).all()
    assert kept.eq(2).all(), "memory that lives stays as it is"


@pytest.mark.parametrize("way", WAYS)
def test_steps_keep_their_bits_while_freed_memory_is_overwritten(way: str) -> None:
    fake = fs.Mesh({"shard": FakeGroup(0, 2)}, late_mesh().device)
    expected = bits_of(fake, contextlib.nullcontext(), **WAYS[way])
    poison = Poison()
    assert equal(bits_of(late_mesh(), poison, **WAYS[way]), expected)
    assert poison.freed


def test_a_collective_that_nothing_waits_for_is_found() -> None:
    expected = bits_of(late_mesh(), contextlib.nullcontext())
    assert not equal(bits_of(late_mesh(waits=False), Poison()), expected)


@pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("way", [way for way in WAYS if way != "offload"])
def test_the_host_waits_for_nothing_in_a_step(way: str) -> None:
    mesh = late_mesh()
    run = made(mesh, **WAYS[way])
    state, batch = run.state, batch_of(mesh)
    for _ in range(2):  # the first steps make the optimizer's state
        state, _ = run.step(state, batch)
    with no_waiting_host():
        run.step(state, batch)
