"""``DryCuda``: a mode in which CUDA tensors are fake, and every wait of the host is noted.

On a GPU the host should issue operations ahead of the device. It waits for the device when it needs
a value (``.item()``, ``if tensor``, a boolean mask) or copies between devices. Fake tensors refuse
operations on tensors of different devices by themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import unittest.mock
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

import funcshard
from benchmarks.dry.allowed import ALLOWED, Allowed
from benchmarks.dry.stream_order import StreamOrder
from funcshard._utils.torch_private import recording_graph

_Mode = TypeVar("_Mode", bound=TorchDispatchMode)

# Operations that read the values of a CUDA tensor on the host, or whose result has a size that
# depends on values.
_READS = {
    "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "repeat_interleave", "bincount",
}  # fmt: skip
_LIBRARY, _TORCH = (str(Path(module.__file__ or "").parent) + "/" for module in (funcshard, torch))
_PYTHON = str(Path(contextlib.__file__).parent) + "/"
_HERE = [str(Path(__file__).with_name(name)) for name in ("mode.py", "stream_order.py")]
_STEP = ("train/train_step.py:__call__", "core/gradients.py:evaluate", "train/per_sample.py:run")
_INDEXING = {"index", "index_put", "index_put_"}
_COPIES = {"_to_copy", "copy_"}


class Wait(NamedTuple):
    """A wait of the host for the device.

    Attributes:
        what: the operation, such as ``"item"`` or ``"copy from cuda to cpu"``.
        site: file and function of the library that it comes from, such as
            ``"core/buffer_comm.py:_to_host"``; of the caller, if no function of the library runs.
        why: the reason why it is allowed; ``""`` if it is not.
    """

    what: str
    site: str
    why: str


class DryCuda(TorchDispatchMode):
    """Note the waits of the host, and answer what the host asks of values that do not exist.

    Attributes:
        waits: all waits so far, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @property
    def forbidden(self) -> list[Wait]:
        """The waits that are not allowed."""
        return [wait for wait in self.waits if not wait.why]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # such as tensor.device
            return func(*args)
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            return _collective(func, args)
        if name in ("is_pinned", "_pin_memory"):
            return self._of_pinned(name, args)
        pinned = kwargs.pop("pin_memory", None)
        found = self._check(name, args, kwargs)
        if name == "_local_scalar_dense" and (found or _has_no_value(args[0])):
            return _answer(found.answer if found else 1.0, args[0].dtype)
        if found is not None and name == "equal":
            return bool(found.answer)
        try:
            out = func(*args, **kwargs)
        except DataDependentOutputException:  # of tensors on the CPU, for which the host does not wait
            return True
        if pinned:
            self._pinned.add(out.untyped_storage())
        return out

    def note_wait(self) -> None:
        """Note that the host waits for a stream or an event; the caller's caller asks for it."""
        self._note("synchronize", sys._getframe(2))

    def _check(self, name: str, args: Any, kwargs: Any) -> Allowed | None:
        what = _wait_of(name, args, kwargs)
        if not what or recording_graph():  # make_fx runs nothing
            return None
        return self._note(what, sys._getframe(2))

    def _note(self, what: str, frame: FrameType) -> Allowed:
        """Note a wait, and return what is allowed at its site."""
        site, in_step = _site(frame)
        allowed = ALLOWED.get(site, Allowed((), ""))
        fits = what in allowed.what and (allowed.in_step or not in_step)
        self.waits.append(Wait(what, site, allowed.why if fits else ""))
        return allowed

    def _of_pinned(self, name: str, args: Any) -> Any:
        tensor = args[0]
        if name == "is_pinned":
            return tensor.untyped_storage() in self._pinned
        assert tensor.device.type == "cpu", "only memory of the CPU is pinned"
        out = tensor.clone()
        self._pinned.add(out.untyped_storage())
        return out


def _wait_of(name: str, args: Any, kwargs: Any) -> str:
    """Return a name for the wait that an operation means for the host; ``""`` if it means none."""
    if name in _COPIES:
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        if source.device.type == target.type or "meta" in (source.device.type, target.type):
            return ""
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        return f"copy from {source.device.type} to {target.type}" if blocking else ""
    if (name not in _READS and name not in _INDEXING) or not args[0].is_cuda:
        return ""
    if name in _READS:
        return "item" if name == "_local_scalar_dense" else name
    indices = [index for index in args[1] if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return "boolean mask"
    return "index on the cpu" if any(index.device.type == "cpu" for index in indices) else ""


def _site(frame: FrameType | None) -> tuple[str, bool]:
    """Return the site of the innermost frame, and whether a step or a gradient runs around it.

    The site is file and function of the library, else those of its caller.
    """
    inner = caller = ""
    in_step = False
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_LIBRARY):
            found = f"{file.removeprefix(_LIBRARY)}:{function}"
            inner, in_step = inner or found, in_step or found in _STEP
        elif not caller and not file.startswith((_TORCH, _PYTHON)) and file not in _HERE:
            caller = f"{file.rpartition('/')[2]}:{function}"
        frame = frame.f_back
    return inner or caller, in_step


def _has_no_value(tensor: FakeTensor) -> bool:
    # Why not in a recording: make_fx makes a symbol of the value.
    return tensor.constant is None and not recording_graph()


def _answer(value: float, dtype: torch.dtype) -> Any:
    return bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)


def _collective(func: Any, args: Any) -> Any:
    """Return what a collective of the "fake" process group returns, without a look at values."""
    name = func._schema.name.partition("::")[2]
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "cuda":
            raise RuntimeError(f"{name} over NCCL takes tensors on CUDA; found {leaf.device.type}")
    work = FakeWork().boxed()
    if name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "broadcast_"):
        return args[0], work
    assert name in ("alltoall_base_", "barrier"), f"the library runs no collective {name}"
    return work


def is_dry() -> bool:
    """Return whether this thread runs dry."""
    return any(isinstance(mode, DryCuda) for mode in _get_current_dispatch_mode_stack())


def current_mode(kind: type[_Mode]) -> _Mode:
    """Return the innermost mode of a class that is active in this thread."""
    return next(mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, kind))


@contextlib.contextmanager
def dry_cuda(fake: FakeTensorMode | None = None) -> Iterator[DryCuda]:
    """Make the tensors of the ``with`` block fake, and yield the mode that notes waits.

    Ranks of one simulation share the mode of the tensors, ``fake``.
    """
    mode = DryCuda()
    with warnings.catch_warnings(), stand_ins(mode.note_wait), fake or FakeTensorMode(), mode:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # it is 0, and aligned
        yield mode


# --- stand-ins for functions of torch.cuda, in a dry run, in which there is no device --------------


def _order() -> StreamOrder | None:
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, StreamOrder)), None)


class Event(NamedTuple):
    """An event of a ``Stream``: what the stream had been given; ``None`` where no order is recorded."""

    clock: dict[str, int] | None
    note_wait: Callable[[], None]

    def synchronize(self) -> None:
        """Make the host wait."""
        self.note_wait()
        if (order := _order()) and self.clock is not None:
            order.synchronize(self.clock)


class Stream(NamedTuple):
    """A stream, by its name in ``StreamOrder``."""

    name: str
    note_wait: Callable[[], None]

    def record_event(self) -> Event:
        """Return an event after all that the stream has been given."""
        return Event(order.event(self.name) if (order := _order()) else None, self.note_wait)

    def wait_stream(self, other: Stream) -> None:
        """Make this stream wait for another one."""
        if order := _order():
            order.wait(self.name, other.name)

    def synchronize(self) -> None:
        """Make the host wait."""
        self.note_wait()
        if order := _order():
            order.synchronize(order.event(self.name))


@contextlib.contextmanager
def stand_ins(note_wait: Callable[[], None]) -> Iterator[None]:
    """Let functions of ``torch.cuda`` answer for one device, and note waits for streams and events."""
    streams = itertools.count(1)
    functions: dict[str, Any] = {
        # Why for the library alone: torch's fake tensors then ask for a device.
        "is_available": lambda: sys._getframe(1).f_code.co_filename.startswith(_LIBRARY),
        "is_initialized": lambda: True,
        "_initialized": True,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "current_stream": lambda *_: Stream(order.current if (order := _order()) else "", note_wait),
        "Stream": lambda *_: Stream(f"stream {next(streams)}", note_wait),
        "stream": lambda stream: order.stream(stream.name) if (order := _order()) else contextlib.nullcontext(),
        "is_bf16_supported": lambda *_: True,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }
    autocast = unittest.mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False)
    with unittest.mock.patch.multiple("torch.cuda", **functions), autocast:
        yield
