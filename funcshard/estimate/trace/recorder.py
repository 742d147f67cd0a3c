"""``Recorder``: write down the storages and operations of a computation as events.

The recorder is a dispatch mode, so it sees every operation and the storage of each result. In
forward an operation belongs to the module that runs; in backward to the one whose forward made the
autograd node that runs.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils.torch_fakes import without_function_modes
from funcshard._utils.torch_operators import (
    count_flops,
    data_bytes,
    moved_bytes,
    writes_inputs,
)
from funcshard._utils.torch_private import (
    TorchDispatchMode,
    next_sequence_number,
    running_sequence_number,
    storage_id,
    stored_parts,
)
from funcshard._utils.tree import is_under, tensors_in
from funcshard.estimate.trace.compiled import is_fused, is_reduction
from funcshard.estimate.trace.tape import (
    Alloc,
    Ask,
    At,
    Event,
    Form,
    Free,
    Grad,
    Op,
    Save,
    UseParam,
)

_DEVICE = torch.ops.prim.device.default


@dataclass(slots=True, eq=False)
class Frame:
    """One call of a module's forward.

    Attributes:
        path: path of the module.
        parent: the call that it happens in; ``None`` for the model itself.
        number: number of the call; a forward that runs again has that of the first.
        fold: index of the fold that its events belong to, if the module is folded.
        stub: whether another module ran in its place.
        again: whether a checkpoint runs it again in backward.
        compiled: whether a compiler fuses the module's operations.
        output_grads: storages of the gradients of its outputs, if these are watched.
        grad_forms: place and form of each gradient of its inputs and outputs, with the storages
            of the latter, if these are watched.
    """

    path: str
    parent: Frame | None
    number: int
    fold: int | None = None
    stub: bool = False
    again: bool = False
    compiled: bool = False
    output_grads: set[int] = field(default_factory=set)
    grad_forms: list[Any] = field(default_factory=list)

    def folded(self, root: Frame | None = None) -> list[Frame]:
        """Return the folded calls from this one out to ``root``, innermost first."""
        folded_calls: list[Frame] = []
        frame: Frame | None = self
        while frame is not None and frame is not root:
            if frame.fold is not None:
                folded_calls.append(frame)
            frame = frame.parent
        return folded_calls

    def outwards(self) -> Iterator[Frame]:
        """Yield the call and those around it, innermost first."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent


class Recorder(TorchDispatchMode):
    """Write down the events of all that runs inside the mode.

    Attributes:
        log: the events, each with its call and phase.
        root: the call of the model.
        frame: the call that runs now.
        phase: the current phase.
        params: name of each parameter by the identity of its storage.
        paused: whether to ignore operations.
    """

    def __init__(self, root: Frame) -> None:
        super().__init__()
        self.log: list[tuple[Frame, str, Event]] = []
        self.frame = root
        self.phase = "forward"
        self.paused = False
        self.root = root
        self._stack: list[Frame] = [root]
        self._frames = 0
        self._last: dict[
            str, Frame
        ] = {}  # the last call of each module, those of backward apart
        self._storages: dict[
            int, tuple[int, Any]
        ] = {}  # by identity: number, weak reference
        self._numbers = 0
        self.params: dict[int, str] = {}
        # The sequence number at which each call began or went on, in order.
        self._starts: list[int] = [next_sequence_number()]
        self._callers: list[Frame] = [root]
        self._running: int | None = None
        self._inside: set[int] = set()  # results that stay inside a fused kernel, by number
        # The call of a compiled module that the operations are of.
        self._region: tuple[int, str] | None = None
        self._used: dict[
            int, list[str]
        ] = {}  # the parameters that each autograd node needs
        # The nodes whose tensors a checkpoint around their module keeps.
        self._asks: set[int] = set()

    # --- calls ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, path: str) -> Iterator[Frame]:
        runs_again = self.phase == "backward" and len(self._stack) == 1
        if runs_again:
            self._follow_backward()
            if self._running not in self._asks:
                self.emit(Ask(self.frame.path))
        frame_before = self.frame
        parent = self._caller(path) if runs_again else self._stack[-1]
        self._frames += 1
        call_frame = Frame(
            path,
            parent,
            self._frames,
            again=runs_again or parent.again,
            compiled=parent.compiled,
        )
        if call_frame.again:
            # Note: a module that forward never called by itself has no first call.
            call_frame.number = self._last.get(path, call_frame).number
        else:
            self._last[path] = call_frame
        self._stack.append(call_frame)
        self._enter(call_frame)
        try:
            yield call_frame
        finally:
            self._stack.pop()
            self._enter(frame_before if runs_again else self._stack[-1])

    def _enter(self, frame: Frame) -> None:
        self.frame = frame
        if frame is not self.root or self.phase != "backward":
            self._starts.append(next_sequence_number())
            self._callers.append(frame)

    def _caller(self, path: str) -> Frame:
        """Return the call, above the one whose backward runs, that contains the module."""
        return next(frame for frame in self.frame.outwards() if is_under(path, frame.path))

    def _follow_backward(self) -> None:
        """Find the call whose backward runs now."""
        sequence_number = running_sequence_number()
        if (
            sequence_number is not None
            and sequence_number != self._running
            and sequence_number < next_sequence_number()
        ):
            self._running = sequence_number
            # Note: nodes are numbered in the order of forward, so the last start before this number
            # is that of the call that made the node.
            position = bisect.bisect_right(self._starts, sequence_number) - 1
            self.frame = self._callers[max(position, 0)]
            if sequence_number in self._asks:
                self.emit(Ask(self.frame.path))
            # Note: the node unpacks the parameters that it saved, so the runtime gathers them here.
            for name in self._used.pop(sequence_number, ()):
                self.emit(UseParam(name))

    def touch(self) -> None:
        """Note that backward runs here, even if it makes no tensor."""
        if self.phase == "backward":
            self._follow_backward()
            self.emit(At(self.frame.path, self.phase))

    def fold_around(self) -> Frame | None:
        """Return the innermost running call of a module that represents others."""
        return next(iter(self._stack[-1].folded()), None)

    def runs(self, path: str) -> bool:
        """Return whether a call of a module runs, in forward or in a checkpoint."""
        frame = self._stack[-1]
        if self.phase == "backward" and frame is self.root:
            self._follow_backward()
            frame = self.frame
        return any(outer_frame.path == path for outer_frame in frame.outwards())

    def watch_grads(self, frame: Frame, inputs: Iterable[torch.Tensor], out: Any) -> None:
        """Note the gradients of a call's inputs and outputs when backward reaches them."""

        def note(place: int, is_output: bool, grad: torch.Tensor | None) -> None:
            if grad is None:
                return
            storages = (
                set(map(self.number, self.parts([grad]))) if is_output else set[int]()
            )
            frame.output_grads |= storages
            frame.grad_forms.append((place, _form(grad), storages))

        # Note: hooks of outputs run when their gradients have been added up. Those of inputs see
        # the gradient that this call adds, whoever adds it up.
        for is_output, tensors in enumerate((inputs, tensors_in(out))):
            for place, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(note, place, bool(is_output)))

    # --- storages ---------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        self.log.append((self.frame, self.phase, event))

    def number(self, tensor: torch.Tensor, *, known: bool = False) -> int:
        """Return the number of a tensor's storage, and note a new one unless it's ``known``."""
        storage_identity = storage_id(tensor)
        storage_number = self._storages.get(storage_identity)
        if storage_number is not None:
            return storage_number[0]
        self._numbers += 1
        storage_index, storage = self._numbers, tensor.untyped_storage()

        def freed(_: Any) -> None:
            del self._storages[storage_identity]
            if not known:
                self.emit(Free(storage_index))

        # Note: ``freed`` runs when nothing refers to the storage, which is when its data would be
        # freed.
        self._storages[storage_identity] = storage_index, weakref.ref(storage, freed)
        if not known:
            self.emit(Alloc(storage_index, storage.nbytes()))
        return storage_index

    def unseen(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor whose memory the tape doesn't count."""
        self.paused = True
        tensor = make()
        self.paused = False
        self.number(tensor, known=True)
        return tensor

    def watch_param(self, name: str, param: torch.Tensor) -> None:
        """Watch a parameter that is ``unseen``: its gradient is an event."""
        self.params[storage_id(param)] = name
        if param.requires_grad:
            # Why None: the calls of a module may take all gradients of its parameters.
            param.register_hook(
                lambda grad: (
                    None if grad is None else self.emit(Grad(name, self.number(grad)))
                )
            )

    def complete(self, name: str, grad: torch.Tensor, call: int) -> None:
        self._follow_backward()
        self.emit(Grad(name, self.number(grad), call))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd saves; a hook for ``saved_tensors_hooks``."""
        if not self._saves_param(tensor):
            for part in self.parts([tensor]):
                self.emit(Save(self.number(part), str(part.dtype).removeprefix("torch.")))
        return tensor

    def _saves_param(self, tensor: torch.Tensor) -> bool:
        """Return whether autograd saves a parameter, and note its use."""
        param_name = self.params.get(storage_id(tensor))
        if param_name is not None:
            self.emit(UseParam(param_name))
            # Why minus 1: autograd makes the node first, and then lets it save.
            self._used.setdefault(next_sequence_number() - 1, []).append(param_name)
        return param_name is not None

    def parts(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the plain tensors of ``tensors``: several of a sparse one."""
        paused_before, self.paused = self.paused, True
        try:
            parts = [
                [tensor] if tensor.layout is torch.strided else stored_parts(tensor)
                for tensor in tensors
            ]
            return [
                part for tensor_parts in parts for part in tensor_parts if storage_id(part)
            ]
        finally:
            self.paused = paused_before

    def pack_held(self, outer: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Note a tensor that a checkpoint keeps, and let it pack the tensor."""
        if self.phase != "backward" and not self._saves_param(tensor):
            self._asks.add(next_sequence_number() - 1)
        return outer(tensor)

    # --- operations -------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Why: the wrapper that torch would put around each operation imports Dynamo.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Why here: two of three calls are torch's questions for a device, which fake tensors know.
        if func is _DEVICE:
            return args[0].device
        with without_function_modes():
            out = func(*args, **kwargs)
            if not self.paused and func.namespace != "prim":
                self._write(func, args, kwargs, out)
        return out

    def _write(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Write down an operation."""
        if self.phase == "backward" and len(self._stack) == 1:
            self._follow_backward()
        output_tensors = tensors_in(out)
        stored_results = self.parts(output_tensors)
        new_tensors = []
        for tensor in stored_results:
            numbers_before = self._numbers
            self.number(tensor)
            if self._numbers > numbers_before:
                new_tensors.append(tensor)
        if stored_results and (new_tensors or writes_inputs(func)):
            bytes_moved = moved_bytes(func, args, kwargs, new_tensors, self.parts)
            if bytes_moved and self.frame.compiled:
                bytes_moved = self._fused_bytes(
                    func, self.parts(tensors_in((args, kwargs))), stored_results
                )
            flops = count_flops(func, args, kwargs, out)
            lane = str(output_tensors[0].dtype).removeprefix("torch.")
            if (
                func.namespace == "funcshard"
            ):  # a collective, whose arguments end in axis, ranks, label
                lane = f"{func.name().removeprefix('funcshard::')} {args[-3]}"
                bytes_moved = max(map(data_bytes, (*tensors_in(args), *stored_results)))
            if bytes_moved or flops:
                self.emit(Op(flops, bytes_moved, lane))

    def _fused_bytes(
        self, func: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
    ) -> int:
        """Return the bytes that an operation moves if a compiler fuses it."""
        compiled_root = self.frame
        while compiled_root.parent is not None and compiled_root.parent.compiled:
            compiled_root = compiled_root.parent
        # Note: another call begins a new region, in which nothing is fused yet.
        if self._region != (
            compiled_root.number,
            self.phase,
        ):  # each module is compiled by itself
            self._region = compiled_root.number, self.phase
            self._inside.clear()
        outside_inputs = [
            tensor
            for tensor in inputs
            if self.number(tensor, known=True) not in self._inside
        ]
        bytes_moved = sum(map(data_bytes, outside_inputs))
        if is_fused(func):
            self._inside.update(map(self.number, results))
            return bytes_moved
        bytes_moved += sum(map(data_bytes, results))
        # A reduction reads what is in memory, so the fused kernel before it has written it.
        if not is_reduction(func):
            written_inputs = [
                tensor for tensor in inputs if self.number(tensor) in self._inside
            ]
            bytes_moved += 2 * sum(map(data_bytes, written_inputs))
            self._inside.difference_update(map(self.number, written_inputs))
        return bytes_moved


def _form(tensor: torch.Tensor) -> Form | None:
    return Form.of(tensor) if tensor.layout is torch.strided else None
