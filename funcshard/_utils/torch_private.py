"""Everything that touches torch's private API, so that a new torch release is checked in one file.

Public torch has no name for the facts and switches below. Names that start with an underscore may change in any torch
release; ruff's SLF001 keeps them out of all other files.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch._functorch.eager_transforms import jvp_increment_nesting
from torch.autograd import forward_ad

__all__ = [
    "belongs_to_transform_above",
    "callers_level",
    "cuda_sleep",
    "default_store",
    "graph_task_id",
    "group_timeout",
    "is_compiled_in_place",
    "is_legacy_batched",
    "is_transformed",
    "no_torch_function",
    "one_forward_level",
    "outer_saved_tensors_hooks",
    "recording_graph",
    "recording_or_transforming",
    "saved_tensors_hooks_allowed",
    "sequence_number",
    "signed",
    "storage_id",
    "transforms_active",
    "untraced",
    "version",
    "wrapper_subclass",
]

P = ParamSpec("P")
T = TypeVar("T")

# --- torch.func transforms ---------------------------------------------------------------------------------------------

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether a ``torch.func`` transform runs around this code."""

is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Return whether a transform of ``torch.func`` wraps the tensor."""

is_legacy_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Return whether ``torch.autograd.grad(is_grads_batched=True)`` batches the tensor."""


def belongs_to_transform_above(tensor: torch.Tensor) -> bool:
    """Return whether a transform that does not run here wraps ``tensor``: code below that transform captured it."""
    functorch = torch._C._functorch
    level = functorch.maybe_get_level(tensor)
    stack = functorch.get_interpreter_stack() or []
    if level > len(stack):
        return True
    mapped = level > 0 and stack[level - 1].key() == functorch.TransformType.Vmap
    return level > 0 and functorch.is_batchedtensor(tensor) != mapped


@contextlib.contextmanager
def one_forward_level() -> Iterator[None]:
    """Open torch's one level of forward-mode differentiation, unless it is open.

    torch has one level for a whole process, which threads cannot enter one by one. Inside an open ``jvp``,
    ``torch.func.jvp`` uses the level that is open.
    """
    if forward_ad._current_level >= 0:
        yield
        return
    with jvp_increment_nesting(), forward_ad.dual_level():
        yield


# --- autograd ----------------------------------------------------------------------------------------------------------

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward that runs on this thread, -1 outside of any."""

saved_tensors_hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
"""Return whether ``torch.autograd.graph.saved_tensors_hooks`` may be used here."""


def outer_saved_tensors_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the innermost pair of saved-tensor hooks that is active, if there is one."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def sequence_number(node: Any) -> int:
    """Return the number of an autograd node; nodes that forward makes later have higher numbers."""
    return int(node._sequence_nr())


def signed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Store the signature of an autograd Function's ``forward`` on it: positional arguments without defaults.

    ``Function.apply`` asks for the signature of ``forward`` at every call and binds the arguments to it, to fill in
    defaults. That takes longer than the rest of a small unit. A stored signature (PEP 362) is found at once, and without
    defaults binding has nothing to do.
    """
    assert all(p.default is inspect.Parameter.empty for p in inspect.signature(forward).parameters.values())
    forward.__signature__ = _Positional.from_callable(forward)  # type: ignore[attr-defined]
    return forward


class _Positional(inspect.Signature):
    """A signature whose ``bind`` returns the arguments unchecked; the call itself raises where they do not fit."""

    def bind(self, *args: Any, **kwargs: Any) -> _Bound:  # type: ignore[override]
        return _Bound(args, kwargs)


class _Bound:
    __slots__ = ("args", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def apply_defaults(self) -> None:
        """Do nothing: there are no defaults."""


# --- tensors and modules -----------------------------------------------------------------------------------------------


def version(tensor: torch.Tensor) -> int:
    """Return how often the memory of ``tensor`` has been written to in place."""
    return tensor._version


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that tensors with the same storage share, as long as one of them lives."""
    return tensor.untyped_storage()._cdata


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a tensor subclass that overrides ``__torch_dispatch__`` only."""


def wrapper_subclass(
    cls: type[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, requires_grad: bool
) -> Any:
    """Return a tensor of class ``cls`` that has a shape, dtype and device, but no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` has been called."""
    return module._compiled_call_impl is not None


# --- graphs and Dynamo -------------------------------------------------------------------------------------------------


def recording_graph() -> bool:
    """Return whether ``make_fx`` records the operations that run here."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def recording_or_transforming() -> bool:
    """Return whether a dispatch mode or a transform sees the operations that run here."""
    return torch._C._len_torch_dispatch_stack() > 0 or transforms_active()


def untraced(f: Callable[P, T]) -> Callable[P, T]:
    """Keep Dynamo out of ``f`` and of what ``f`` calls; functions that are compiled there stay compiled.

    A graph of a collective would hold the memory that the collective writes into, and not the collective.
    ``torch.compiler.disable`` imports Dynamo, which takes longer than all of this library, so it is not used here.
    """
    disabled = _disable_dynamo(f)

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return (disabled if "torch._dynamo" in sys.modules else f)(*args, **kwargs)

    return run


def callers_level() -> int:
    """Return the ``stacklevel`` that makes a warning point at the caller of this library, past all its own frames."""
    package = sys.modules[__name__.partition(".")[0]]
    inside = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (package, torch))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


# --- torch.distributed and CUDA ----------------------------------------------------------------------------------------


def default_store() -> dist.Store:
    """Return the store through which the processes of the default process group met."""
    return dist.distributed_c10d._get_default_store()


def group_timeout(group: Any) -> Any:
    """Return the timeout of a process group, a ``datetime.timedelta``."""
    return group._get_backend(group._device_types[0]).options._timeout


def cuda_sleep(cycles: int) -> None:
    """Let the current CUDA stream wait for a number of clock cycles."""
    torch.cuda._sleep(cycles)
