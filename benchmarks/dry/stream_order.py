"""``StreamOrder``: find two accesses of one storage, one of them a write, that nothing orders.

A GPU runs the operations of one stream in order, and those of several streams in any order, unless
one stream waits for an event of another. A missing wait gives wrong numbers in some runs. Here each
operation is recorded with the storages that it reads and writes, and a clock is kept for each actor:
the host and every stream. A clock is a vector: how far the actor has seen each of the actors. An
access is in order if its actor has seen the accesses of others before it. Such a check needs one
run, and no luck.

The rules of torch that are modelled:

- The host issues an operation to the current stream, which has then seen all that the host has.
- A collective of NCCL runs on a stream of its process group, which first waits for the current
  stream. ``wait`` makes the current stream wait for it, and not the host. Until then the work keeps
  the tensors alive.
- A copy between devices makes the host wait, unless it is called with ``non_blocking=True``.
- The memory of a freed tensor is used again at once by the stream that it was allocated on. So the
  end of a storage counts as a write by that stream, unless ``record_stream`` named the other ones.

Source of the rules: "CUDA semantics" in torch's documentation, and the notes on ``record_stream``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

HOST = "host"
_Clock = dict[str, int]


class _Access(NamedTuple):
    actor: str
    time: int
    what: str


@dataclass(slots=True, eq=False)
class _Memory:
    """The accesses of one storage that later ones must be ordered after."""

    stream: str
    bytes: int
    host: bool
    written: _Access | None = None
    read: dict[str, _Access] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)


class StreamOrder(TorchDispatchMode):
    """Record what runs on which stream while the mode is active, around a dry run.

    Attributes:
        unordered: the pairs of accesses that were found, in words.
        accesses: number of accesses that were checked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unordered: list[str] = []
        self.accesses = 0
        self._clocks: dict[str, _Clock] = {HOST: {HOST: 0}}
        self._memories: dict[int, _Memory] = {}
        self._stream = "compute"
        self._of_thread = threading.local()
        self._lock = threading.RLock()  # a storage may end in another thread
        self._works: list[_Work] = []  # torch refers to a work by its C++ part alone

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Issue the operations of the ``with`` block to another stream."""
        before, self._stream = self._stream, name
        try:
            yield
        finally:
            self._stream = before

    @contextlib.contextmanager
    def new_thread(self) -> Iterator[None]:
        """Issue the operations of this thread to the default stream, as those of a new thread are."""
        self._of_thread.stream = "compute"
        try:
            yield
        finally:
            del self._of_thread.stream

    @property
    def current(self) -> str:
        """Name of the stream that operations of this thread are issued to."""
        return getattr(self._of_thread, "stream", self._stream)

    def event(self, stream: str) -> _Clock:
        """Return an event of a stream: all that it has been given so far."""
        return dict(self._clock(stream))

    def synchronize(self, event: _Clock) -> None:
        """Make the host wait for an event."""
        self._see(HOST, event)

    def wait(self, stream: str, other: str) -> None:
        """Make a stream wait for all that another one has been given so far."""
        self._see(stream, self._clock(other))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args)
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args)
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name == "record_stream":
            self._memory(args[0]).recorded.add(self.current)
            return out
        self._operation(name, func, args, kwargs, out)
        return out

    # --- operations -------------------------------------------------------------------------------

    def _operation(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        written, views = _effects(func)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        writes = _tensors([given.get(argument) for argument in written])
        reads = [] if views else _tensors([value for argument, value in given.items() if argument not in written])
        made = [] if views or written else _tensors(out)
        if not (writes or reads or made):
            return
        on_device = any(_device(tensor) == "cuda" for tensor in (*writes, *reads, *made))
        actor = self.current if on_device else HOST
        if on_device:
            self._see(actor, self._clock(HOST))
        for tensor in reads:
            self._access(actor, tensor, name, write=False)
        for tensor in (*writes, *made):
            self._access(actor, tensor, name, write=True)
        if on_device and _host_waits(name, args, kwargs, (*reads, *writes, *made)):
            self._see(HOST, self._clock(actor))

    def _collective(self, func: Any, args: Any) -> Any:
        """Record a collective on the stream of its process group; return what torch returns."""
        func(*args)  # checks the tensors
        name = func._schema.name.partition("::")[2].strip("_")
        out, given, stream, returns = _of_collective(name, args)
        self._see(stream, self._clock(HOST))
        self._see(stream, self._clock(self.current))
        for tensor in given:
            self._access(stream, tensor, name, write=False)
        for tensor in out:
            self._access(stream, tensor, name, write=True)
        work = _Work(self, dict(self._clock(stream)), [*given, *out])
        self._works.append(work)
        boxed = work.boxed()
        return boxed if returns is None else (returns, boxed)

    # --- clocks -----------------------------------------------------------------------------------

    def _clock(self, actor: str) -> _Clock:
        return self._clocks.setdefault(actor, {actor: 0})

    def _see(self, actor: str, clock: _Clock) -> None:
        own = self._clock(actor)
        for other, time in clock.items():
            own[other] = max(own.get(other, 0), time)

    def _access(self, actor: str, tensor: torch.Tensor, what: str, *, write: bool) -> None:
        with self._lock:
            memory, clock = self._memory(tensor), self._clock(actor)
            self.accesses += 1
            clock[actor] += 1
            now = _Access(actor, clock[actor], f"{what} on {actor}")
            self._check(memory, clock, now.what, write=write)
            if write:
                memory.written, memory.read = now, {}
            else:
                memory.read[actor] = now

    def _check(self, memory: _Memory, clock: _Clock, what: str, *, write: bool) -> None:
        """Note each earlier access that ``clock`` has not seen, if one of the two writes."""
        for access in [*[memory.written] * (memory.written is not None), *(memory.read.values() if write else ())]:
            if clock.get(access.actor, 0) < access.time and not (what == "free" and access.actor in memory.recorded):
                words = f"{what} is not ordered after {access.what}, and one of them writes ({memory.bytes} bytes)"
                self.unordered.append(words)

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._memories.get(key)
        if found is None:
            host = _device(tensor) != "cuda"
            found = self._memories[key] = _Memory(HOST if host else self.current, storage.nbytes(), host)
            weakref.finalize(storage, self._free, key).atexit = False
        return found

    def _free(self, key: int) -> None:
        """Take the memory of a storage as free: its stream may write to it from now on."""
        with self._lock:
            memory = self._memories.pop(key, None)
            if memory is None or memory.host:  # torch's allocator of pinned memory waits for streams
                return
            clock = dict(self._clock(memory.stream))
            for other, time in self._clock(HOST).items():
                clock[other] = max(clock.get(other, 0), time)
            self._check(memory, clock, "free", write=True)


class _Work(dist._Work):
    """The work of a recorded collective; ``wait`` makes the current stream wait for it."""

    def __init__(self, order: StreamOrder, end: _Clock, held: list[torch.Tensor]) -> None:
        super().__init__()
        self._order, self._end, self._held = order, end, held

    def wait(self, timeout: Any = None) -> bool:
        self._order._see(self._order.current, self._end)
        self._held = []
        return True


@functools.cache
def _effects(func: Any) -> tuple[tuple[str, ...], bool]:
    """Return the names of the arguments that an operation writes to, and whether it makes a view."""
    written = tuple(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    views = not written and any(r.alias_info is not None for r in func._schema.returns)
    metadata = func._schema.name.startswith("prim::") or func._schema.name in ("aten::is_pinned", "aten::_version")
    return written, views or metadata


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [leaf for each in tree for leaf in _tensors(each)]
    return []


def _device(tensor: Any) -> str:
    """Return the type of a tensor's device, without a dispatch through all modes."""
    found = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return str(found.type)


def _host_waits(name: str, args: Any, kwargs: Any, tensors: Any) -> bool:
    if name == "_local_scalar_dense":
        return True
    if len({_device(tensor) for tensor in tensors if tensor.ndim or name in ("copy_", "_to_copy")}) < 2:
        return False
    return not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))


def _of_collective(name: str, args: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], str, Any]:
    """Return outputs, inputs, the name of the group, and the result that comes with the work."""
    group = next(_name_of(arg) for arg in args if isinstance(arg, torch.ScriptObject) and _name_of(arg))
    if name in ("allgather_base", "reduce_scatter_base"):
        return [args[0]], [args[1]], group, args[0]
    if name in ("allreduce", "broadcast"):
        return _tensors(args[0]), [], group, args[0]
    assert name == "alltoall_base", f"the library runs no collective {name}"
    return [args[0]], [args[1]], group, None


def _name_of(value: Any) -> str:
    try:
        return str(dist.ProcessGroup.unbox(value).group_name)
    except (RuntimeError, TypeError):
        return ""
