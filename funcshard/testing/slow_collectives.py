"""Slow collectives, for tests: they expose code that reads a result before it has waited for it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils.options import check_number
from funcshard._utils.torch_private import cuda_sleep
from funcshard.comm import (
    CustomGroup,
    DeferredWork,
    Group,
    Mesh,
    Op,
    Work,
    WrappedGroup,
    remade,
)

__all__ = ["KINDS", "DelayedGroup", "delayed"]

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def delayed(mesh: Mesh, kind: str, seconds: float) -> Mesh:
    """Return a mesh like ``mesh`` on which collectives of one kind are slow.

    Until you wait for a slow collective, its output is full of NaN, or of zeros if the dtype has no
    NaN. So code that reads too early computes NaN in every run, and code that waits gets the same
    bits as without the delay. On CUDA a separate stream sleeps, and the host does not.

    Arguments:
        mesh: simulated, local or real ranks.
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"`` or
            ``"broadcast"``. For several kinds, nest the calls.
        seconds: the time from the start of a collective to its result.

    Returns:
        A new mesh of the same ranks. If you use it on some ranks only, only those are slow.

    Raises:
        ValueError: ``kind`` is none of these, or ``seconds`` is negative or not finite.

    Example:
        >>> import torch, funcshard as fs
        >>> from funcshard.comm import Op
        >>> from funcshard.testing import delayed
        >>> def main(mesh):
        ...     slow = delayed(mesh, "all_reduce", 0.01)
        ...     tensor = torch.ones(2)
        ...     work = slow.shard.start(Op("all_reduce", "", tensor))
        ...     early = tensor.tolist()
        ...     work.wait()
        ...     return early, tensor.tolist()
        >>> fs.simulate(main, world_size=2)
        [([nan, nan], [2.0, 2.0]), ([nan, nan], [2.0, 2.0])]

    Source: ``ModuleWithDelay`` of ``torch.testing._internal.common_fsdp``.
    """
    if kind not in KINDS:
        raise ValueError(
            f"kind must be one of {', '.join(KINDS)}; found {kind!r}: for several kinds nest the "
            "calls"
        )
    check_number("seconds", seconds, least=0, remedy="pass 0.0 for no delay")
    return remade(
        mesh, {axis: _delayed(group, kind, seconds) for axis, group in mesh.groups.items()}
    )


def _delayed(group: Group, kind: str, seconds: float) -> Group:
    # The functions of the user's stay, and their collectives are slow.
    if isinstance(group, CustomGroup):
        return dataclasses.replace(group, inner=DelayedGroup(group.inner, kind, seconds))
    return DelayedGroup(group, kind, seconds)


@dataclass(frozen=True, slots=True)
class DelayedGroup(WrappedGroup):
    """A group whose collectives of one kind are slow; see ``delayed``.

    Attributes:
        kind: the slow kind.
        seconds: the time from the start of a slow collective to its result.
    """

    kind: str
    seconds: float

    def around(self, group: Group) -> Group:
        return DelayedGroup(self.inner.around(group), self.kind, self.seconds)

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        return DelayedGroup(
            self.inner.subgroup(global_ranks, axis), self.kind, self.seconds
        )

    def start(self, op: Op) -> Work:
        out = op.out
        if op.kind.removesuffix("_shared") != self.kind:
            return self.inner.start(op)
        hidden: torch.Tensor | None = None
        if out is not None:  # else the caller gets a tensor only from ``wait``
            with torch.no_grad():
                # The slow collective writes here in place of ``out``, which may be its input too.
                hidden = torch.empty_like(out) if op.data is not None else out.clone()
                out.fill_(
                    float("nan") if out.is_floating_point() or out.is_complex() else 0
                )
        work = self.inner.start(op._replace(out=hidden))
        sleep = _sleep((op.data if out is None else out).device, self.seconds)

        def finish() -> Any:
            result = work.wait()
            sleep()
            if out is not None:
                with torch.no_grad():
                    out.copy_(hidden)
            return result

        return DeferredWork(finish)


def _sleep(device: torch.device, seconds: float) -> Callable[[], None]:
    return (
        _sleep_on_stream(device, seconds)
        if device.type == "cuda"
        else _sleep_on_host(seconds)
    )


def _sleep_on_host(seconds: float) -> Callable[[], None]:
    end = time.monotonic() + seconds
    return lambda: time.sleep(max(0.0, end - time.monotonic()))


def _sleep_on_stream(device: torch.device, seconds: float) -> Callable[[], None]:
    """Start a sleep on a new stream; the function returned makes the current stream wait for it."""
    # Why another stream: the current one computes until it waits, as with a real collective.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        cuda_sleep(int(seconds * _cycles_per_second(device)))
    return lambda: torch.cuda.current_stream(device).wait_stream(stream)


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 10_000_000
    with torch.cuda.device(device):
        cuda_sleep(cycles)  # not timed: it also loads the kernel
        begin.record()
        cuda_sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1000)
