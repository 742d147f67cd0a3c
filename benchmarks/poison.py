"""``Poison``: fill the memory of each freed tensor, so that a read of it gives other numbers.

A GPU's allocator gives the memory of a freed tensor to the next tensor of the same stream, though
another stream may still read it. Usually the values are still there, so a missing wait goes
unnoticed. Under this mode a kernel on the stream that allocated the memory overwrites it with NaN.
Steps with and without the mode must give the same bits.

The collectives of ``StreamGroup`` run on a stream of their own, and sleep first, so that they read
late. The ranks beside this one do not exist: their data counts as equal to that of this rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import funcshard as fs
from benchmarks.dry.steps import batch_of, made
from benchmarks.fake_ranks import FakeGroup
from funcshard._utils.torch_private import cuda_sleep
from funcshard.comm import AllGatherWork, Group, Work, all_gather_private

__all__ = ["Poison", "StreamGroup", "bits_of", "stream_mesh", "table"]


class Poison(TorchDispatchMode):
    """Overwrite the memory of each tensor when it ends, while the mode is active.

    Arguments:
        device: type of the device whose memory is overwritten.

    Attributes:
        freed: number of pieces of memory that were overwritten.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.freed = 0
        self._device = device
        self._known: set[int] = set()
        self._active = True
        self._fill = _filler(device)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._active = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device:
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size and address not in self._known:
            self._known.add(address)
            stream = torch.cuda.current_stream().cuda_stream if self._device == "cuda" else 0
            weakref.finalize(storage, self._end, address, size, stream).atexit = False

    def _end(self, address: int, size: int, stream: int) -> None:
        # Called just before the allocator gets the memory back, so nothing else has it yet.
        self._known.discard(address)
        if self._active:
            self._fill(address, size, stream)
            self.freed += 1


def _filler(device: str) -> Callable[[int, int, int], None]:
    """Return a function that fills ``size`` bytes at an address, on a stream, with NaN in every dtype."""
    if device == "cpu":

        def set_bytes(address: int, size: int, stream: int) -> None:
            ctypes.memset(address, 255, size)

        return set_bytes
    driver = ctypes.CDLL("libcuda.so.1")

    def fill(address: int, size: int, stream: int) -> None:
        arguments = ctypes.c_uint64(address), ctypes.c_ubyte(255), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        code = driver.cuMemsetD8Async(*arguments)
        if code:
            raise RuntimeError(f"cuMemsetD8Async ended with code {code}")

    return fill


@dataclass(frozen=True, slots=True)
class _Issued:
    """A collective on a stream of its own; it holds its tensors until it is waited for.

    Attributes:
        stream: the stream; ``None`` on the CPU.
        held: the tensors.
    """

    stream: Any
    held: list[torch.Tensor]

    def wait(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.held.clear()


@dataclass(frozen=True, slots=True)
class StreamGroup(FakeGroup):
    """One rank of a group, without the others, whose collectives are late, each on the group's stream.

    Attributes:
        stream: the stream of the collectives; ``None`` on the CPU.
        cycles: number of the device's clock cycles that each collective sleeps before it reads.
        keeps: whether a collective keeps its tensors and is waited for; ``False`` is the mistake that
            the check has to find.
    """

    stream: Any = None
    cycles: int = 0
    keeps: bool = True

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        ranks = len(global_ranks)
        return StreamGroup(self.rank % ranks, ranks, stream=self.stream, cycles=self.cycles, keeps=self.keeps)

    def _late(self, run: Callable[[], object], *held: torch.Tensor) -> Work:
        if self.stream is None:
            run()
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                cuda_sleep(self.cycles)
                run()
        return _Issued(self.stream, list(held)) if self.keeps else _Issued(None, [])

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Work:
        run = lambda: out.view(self.size, -1).copy_(shard.reshape(1, -1).expand(self.size, -1))  # noqa: E731
        return self._late(run, out, shard)

    def all_gather_shared(self, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
        return all_gather_private(self, shard, label=label)

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, label: str = "") -> Work:
        full = torch.cat([part.reshape(self.size, -1) for part in parts], dim=1).to(out.dtype)
        return self._late(lambda: out.view(-1).copy_(full[self.rank]), out, full)

    def all_reduce(self, tensor: torch.Tensor, *, label: str = "") -> Work:
        return self._late(lambda: tensor.mul_(self.size), tensor)

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Work:
        return self._late(lambda: tensor.mul_(1), tensor)


def stream_mesh(device: str, *, cycles: int = 0, keeps: bool = True) -> fs.Mesh:
    """Return the mesh of rank 0 of 2, whose collectives are late; see ``StreamGroup``."""
    stream = torch.cuda.Stream() if device == "cuda" else None
    group = StreamGroup(0, 2, stream=stream, cycles=cycles, keeps=keeps)
    return fs.Mesh({"shard": group}, torch.device(device, 0) if device == "cuda" else torch.device(device))


def bits_of(mesh: fs.Mesh, poison: Poison | None = None, **options: Any) -> list[torch.Tensor]:
    """Return the losses and shards of three steps of a small model, on the CPU.

    Arguments:
        mesh: the ranks.
        poison: overwrites freed memory meanwhile.
        options: options of ``benchmarks.dry.steps.made``.
    """
    run = made(mesh, **options)
    state, losses = run.state, []
    with poison or contextlib.nullcontext():
        for _ in range(3):
            state, metrics = run.step(state, batch_of(mesh))
            losses.append(metrics["loss"])
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    return [each.detach().cpu() for each in (*losses, *(shard for unit in state.shards.values() for shard in unit.values()))]


WAYS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "shard_grad_op": {"plan": {"strategy": "shard_grad_op"}},
    "buckets": {"plan": {"bucket_bytes": 1 << 12}},
    "offload": {"plan": {"offload": True}},
    "bfloat16": {"plan": {"precision": fs.MixedPrecision(torch.bfloat16, torch.float32)}},
    "remat, clipped": {"remat": ("blocks.0", "blocks.1"), "max_norm": 1.0},
    "micro-batches": {"accumulate": 2, "reduce": "once"},
}


def table(device: str, *, cycles: int = 2_000_000, ways: Sequence[str] = tuple(WAYS)) -> tuple[dict[str, Any], bool]:
    """Return the table of the check, and whether all is well.

    Arguments:
        device: ``"cuda"``; on ``"cpu"`` the collectives are not late.
        cycles: see ``StreamGroup``; 2 million take about 1 ms.
        ways: the steps to check, of ``WAYS``.
    """
    rows, ok = [], True
    for name in ways:
        options = WAYS[name]
        expected = bits_of(stream_mesh(device), **options)
        poison = Poison(device)
        found = bits_of(stream_mesh(device, cycles=cycles), poison, **options)
        equal = all(one.equal(other) for one, other in zip(found, expected, strict=True))
        ok = ok and equal and poison.freed > 0
        rows.append([name, "equal bits" if equal else "OTHER BITS", str(poison.freed)])
    if device == "cuda":
        planted = bits_of(stream_mesh(device, cycles=cycles, keeps=False), Poison(device))
        seen = not all(one.equal(other) for one, other in zip(planted, bits_of(stream_mesh(device)), strict=True))
        rows.append(["planted: works that nothing waits for", "found" if seen else "NOT FOUND", ""])
        ok = ok and seen
    header = ["step", "with freed memory overwritten", "pieces overwritten"]
    return {"title": "Memory reuse across streams", "header": header, "rows": rows}, ok
