"""Mistakes that are planted in the library for one case each, and that its dry run must find."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.dry.stream_order import StreamOrder
from funcshard._utils.random_state import RandomState
from funcshard._utils.torch_private import recording_graph
from funcshard.comm import DONE, native, torch_group
from funcshard.core import buffer_comm
from funcshard.graph import tidying
from funcshard.train import train_step

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake, and the words in which a dry run reports it.

    Attributes:
        case: name of the case that runs with it.
        words: a part of the report.
        plant: makes the mistake during a ``with`` block.
        order: options of ``StreamOrder``, for mistakes in place of torch.
        quick: whether the tests plant it.
    """

    case: str
    words: str
    plant: Callable[[StreamOrder], Any] = lambda order: contextlib.nullcontext()
    order: Mapping[str, bool] = field(default_factory=dict)
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


def _buffer_on_the_cpu(empty: Any, order: StreamOrder) -> Any:
    return lambda group, numel, like: torch.empty(numel, dtype=like.dtype)


def _no_wait(wait: Any, order: StreamOrder) -> Any:
    return lambda work: None


def _wait_on_another_stream(wait: Any, order: StreamOrder) -> Any:
    def changed(work: Any) -> None:
        with order.stream("side"):
            wait(work)

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


def _not_set_back(put: Any, order: StreamOrder) -> Any:
    return lambda state: put(state) if recording_graph() else None


def _without_its_device(layout: Any, order: StreamOrder) -> Any:
    return lambda tensor: layout(tensor)[1:]


_FINISH, _WAIT = (buffer_comm.AllGatherHandle, "finish"), (native._StreamWork, "wait")

FAULTS: dict[str, Fault] = {
    "item() in forward": Fault("bfloat16", "item in core/", _patched(*_FINISH, _reads_a_value)),
    "cpu() in a step": Fault(
        "offload, clipped", "copy from cuda to cpu", _patched(train_step, "clip_by_global_norm", _over_the_cpu)
    ),
    "a buffer on the CPU": Fault(
        "full_shard", "takes tensors on CUDA; found cpu", _patched(torch_group.TorchGroup, "empty", _buffer_on_the_cpu)
    ),
    "a missing wait": Fault("bfloat16", "is not ordered after allgather_base on", _patched(*_WAIT, _no_wait)),
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
    ),
    "a gather that starts before its input is written": Fault(
        "bfloat16", "allgather_base on 1 is not ordered after", order={"starts_after": False}
    ),
    "an input freed before its gather has read it": Fault(
        "bfloat16", "free is not ordered after allgather_base on", order={"keeps": False}
    ),
    "a block reused while another stream reads it": Fault(
        "bfloat16", "free is not ordered after clone on side", _patched(*_FINISH, _read_on_another_stream)
    ),
    "a graph that does not set back the random numbers": Fault(
        "graph", "graphs draw numbers at", _patched(RandomState, "put", _not_set_back), quick=False
    ),
    "a graph without its copies to the CPU": Fault(
        "graph", "same device", _patched(tidying, "_layout", _without_its_device), quick=False
    ),
}
