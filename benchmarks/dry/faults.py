"""Mistakes that are planted in the library for one case each, and that its dry run must find."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.dry.stream_order import StreamOrder, _Work
from funcshard.comm import DONE
from funcshard.comm.torch_group import TorchGroup
from funcshard.core import buffer_comm
from funcshard.graph import tidying
from funcshard.train import train_step


class Fault(NamedTuple):
    """A mistake, and the words in which a dry run reports it.

    Attributes:
        case: name of the case that runs with it.
        words: a part of the report.
        plant: makes the mistake during a ``with`` block.
        quick: whether the tests plant it.
    """

    case: str
    words: str
    plant: Callable[[StreamOrder], Any]
    quick: bool = True


def _patched(owner: Any, name: str, changed: Callable[[Any, StreamOrder], Any]) -> Callable[[StreamOrder], Any]:
    """Return a function that replaces ``owner.name`` by ``changed`` of it during a ``with`` block."""
    return lambda order: unittest.mock.patch.object(owner, name, changed(getattr(owner, name), order))


def _reads_a_value(finish: Any, order: StreamOrder) -> Any:
    def changed(handle: Any) -> torch.Tensor:
        out: torch.Tensor = finish(handle)
        out.sum().item()
        return out

    return changed


def _over_the_cpu(clip: Any, order: StreamOrder) -> Any:
    def changed(grads: Any, *rest: Any, **options: Any) -> Any:
        grads, norm = clip(grads, *rest, **options)
        return grads, norm.cpu()

    return changed


def _wait_on_another_stream(wait: Any, order: StreamOrder) -> Any:
    def changed(work: Any, timeout: Any = None) -> Any:
        with order.stream("side"):
            return wait(work)

    return changed


def _copy_that_nothing_waits_for(start_copy: Any, order: StreamOrder) -> Any:
    return lambda *arguments: (start_copy(*arguments)[0], DONE)


def _read_on_another_stream(finish: Any, order: StreamOrder) -> Any:
    def changed(handle: Any) -> torch.Tensor:
        out: torch.Tensor = finish(handle)
        order.wait("side", "compute")
        with order.stream("side"):
            out.clone()
        return out

    return changed


_FINISH, _WAIT = (buffer_comm.AllGatherHandle, "finish"), (_Work, "wait")

FAULTS: dict[str, Fault] = {
    "item() in forward": Fault("bfloat16", "item in core/", _patched(*_FINISH, _reads_a_value)),
    "cpu() in a step": Fault(
        "offload, clipped",
        "copy from cuda to cpu",
        _patched(train_step, "clip_by_global_norm", _over_the_cpu),
        quick=False,
    ),
    "a buffer on the CPU": Fault(
        "full_shard",
        "takes tensors on CUDA; found cpu",
        _patched(TorchGroup, "empty", lambda *_: lambda group, numel, like: torch.empty(numel, dtype=like.dtype)),
    ),
    "a missing wait": Fault(
        "bfloat16", "is not ordered after allgather_base on", _patched(*_WAIT, lambda *_: lambda work, timeout=None: True)
    ),
    "a wait on another stream": Fault(
        "bfloat16", "is not ordered after allgather_base on", _patched(*_WAIT, _wait_on_another_stream)
    ),
    "a copy to the CPU that is not waited for": Fault(
        "offload, clipped",
        "on host is not ordered after copy_ on stream",
        _patched(buffer_comm, "_to_host", _copy_that_nothing_waits_for),
    ),
    "a copy from the CPU that is not waited for": Fault(
        "evaluation, offload",
        "on host is not ordered after _to_copy on compute",
        _patched(buffer_comm, "_to_device", _copy_that_nothing_waits_for),
        quick=False,
    ),
    "a block reused while another stream reads it": Fault(
        "bfloat16", "free is not ordered after clone on side", _patched(*_FINISH, _read_on_another_stream)
    ),
    "a graph without its copies to the CPU": Fault(
        "graph",
        "same device",
        _patched(tidying, "_layout", lambda layout, order: lambda tensor: layout(tensor)[1:]),
        quick=False,
    ),
}
