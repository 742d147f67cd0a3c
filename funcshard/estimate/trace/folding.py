"""Fold a log: keep the events of one module, which represents others.

The log has all events, each with its call. In the tape, a call of a folded module is one ``Call``
event for its forward and one for its backward. The events of the module that really ran become the
parts of the ``Fold``. A ``Stub`` represents a module whose kind ran before, with inputs of the same
form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard.estimate.trace.recorder import Frame, Recorder
from funcshard.estimate.trace.tape import (
    Alloc,
    At,
    Call,
    Enter,
    Event,
    Exit,
    Fold,
    Form,
    Free,
    Grad,
    Op,
    Tape,
    renumbered,
    rewritten,
)

Log = Sequence[tuple[Frame, str, Event]]

# The first numbers inside a fold of storages that it exchanges with its caller.
_INPUTS, _OUTPUTS, _GIVEN, _MADE = -1, -1001, -2001, -3001


class CannotFoldError(Exception):
    """Some modules are called in ways in which no other one can represent them.

    Attributes:
        paths: paths of modules that may not be folded; if empty, all those inside folded ones.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        super().__init__()
        self.paths = frozenset(paths)


def fold_log(log: Log, paths: Sequence[str]) -> Tape:
    """Return the tape of a log.

    Arguments:
        log: the events, each with its call and phase.
        paths: path of the module that represents each fold.

    Raises:
        CannotFoldError: backward of a module is not that of the one that represents it.
    """
    log_folder = _Folder(log)
    events = log_folder.level(log, None)
    log_folder.check_backwards()
    folds = []
    for fold_index, path in enumerate(paths):
        fold_parts = {
            phase: tuple(log_folder.completed(part))
            for phase, part in log_folder.parts.get(fold_index, {}).items()
        }
        folds.append(Fold(path, fold_parts))
    return Tape(tuple(log_folder.completed(events)), tuple(folds))


@dataclass(slots=True)
class _Window:
    """The events of one phase of one call of a folded module."""

    frame: Frame
    phase: str
    log: list[tuple[Frame, str, Event]] = field(default_factory=list)


class _Folder:
    """Folds a log level by level; ``parts`` are the parts of each fold, by its index."""

    def __init__(self, log: Log) -> None:
        self.parts: dict[int, dict[str, tuple[Event, ...]]] = {}
        self._sizes = {
            event.storage: event.bytes for _, _, event in log if isinstance(event, Alloc)
        }
        # By number of a call: storage outside -> inside.
        self._exchanged: dict[int, dict[int, int]] = {}
        # By fold: bytes of storages that backward leaves.
        self._left: dict[int | None, list[int]] = {}
        self._own: dict[
            int, set[int]
        ] = {}  # by number of a call: storages that its forward made
        # By fold and path: what each backward leaves and takes, and the forms of gradients.
        self._backwards: dict[int, dict[str, set[Hashable]]] = {}

    def level(self, log: Log, root: Frame | None) -> list[Event]:
        """Return the events of ``root``, with one event for each folded call inside it.

        Arguments:
            log: the events of the call, with those of calls inside it.
            root: the call; ``None`` for the whole log.
        """
        prefix_length = len(root.path) + 1 if root is not None and root.path else 0

        def relative(path: str) -> str:
            return path[prefix_length:]

        events: list[Event | _Window] = []
        open_windows: dict[tuple[int, str], _Window] = {}
        last_place: tuple[str, str] | None = None
        for frame, phase, event in log:
            # Note: the events of one phase of one call become one event, at the place of the first
            # of them. Backward of a call may be interrupted by that of others.
            if folded_calls := frame.folded(root):
                folded = folded_calls[-1]
                fold_phase = "forward"
                if phase == "backward":
                    fold_phase = "recompute" if folded.again else "backward"
                window = open_windows.get((folded.number, fold_phase))
                if window is None:
                    window = open_windows[folded.number, fold_phase] = _Window(
                        folded, fold_phase
                    )
                    events.append(window)
                    # Why: what follows the call needs its own place.
                    last_place = None
                window.log.append((frame, phase, event))
                continue
            # Why not before a Free: tensors die anywhere, and a place means that a module runs.
            if last_place != (frame.path, phase) and not isinstance(event, Free):
                last_place = frame.path, phase
                events.append(At(frame.path[prefix_length:], phase))
            events.append(rewritten(event, relative, int) if prefix_length else event)
        folded_events: list[Event] = []
        for level_event in events:
            if isinstance(level_event, _Window):
                folded_events += self._call(level_event, prefix_length)
            else:
                folded_events.append(level_event)
        return folded_events

    def _call(self, window: _Window, prefix: int) -> list[Event]:
        """Return the call of a window, and the frees that follow it."""
        call_frame, call_events = window.frame, [event for _, _, event in window.log]
        assert call_frame.fold is not None, "a window is that of a folded call"
        exchanged = self._exchanged.setdefault(call_frame.number, {})
        # Note: inside a fold, a storage that the caller knows has a negative number, equal in all
        # calls.
        own_storages = self._own.setdefault(call_frame.number, set())
        made_storages = [event.storage for event in call_events if isinstance(event, Alloc)]
        freed_storages = [event.storage for event in call_events if isinstance(event, Free)]
        if window.phase == "backward":
            grad_storages = {
                event.storage for event in call_events if isinstance(event, Grad)
            }
            known_storages = {*made_storages, *exchanged, *own_storages}
            given_storages = [
                storage for storage in freed_storages if storage not in known_storages
            ]
            # Why sorted: a fold numbers the gradients of outputs first, in all of its calls.
            given_storages.sort(key=lambda each: each not in call_frame.output_grads)
            left_storages = [
                storage
                for storage in made_storages
                if storage not in freed_storages and storage not in grad_storages
            ]
            # Why: a stub makes gradients in the order of its inputs, the module itself in any.
            left_storages.sort(key=self._sizes.__getitem__)
            # Note: autograd gave what this backward frees and never made: gradients of its outputs.
            # It leaves what it made and didn't free: gradients of its inputs.
            _number(exchanged, _GIVEN, given_storages)
            _number(exchanged, _MADE, left_storages)
            if len(call_frame.folded()) > 1:  # inside another one
                self._check(window, given_storages, left_storages)
            else:
                left_sizes = tuple(self._sizes[storage] for storage in left_storages)
                more_given = sum(
                    storage not in call_frame.output_grads for storage in given_storages
                )
                # Note: the module itself may make a gradient of an output, as no stub does.
                grad_forms = frozenset(
                    (*place_form, bool(storages))
                    for *place_form, storages in call_frame.grad_forms
                    if storages.isdisjoint(made_storages)
                )
                backward_form = left_sizes, more_given, grad_forms
                by_path = self._backwards.setdefault(call_frame.fold, {})
                by_path.setdefault(call_frame.path, set()).add(backward_form)
        else:
            enters = [event.storages for event in call_events if isinstance(event, Enter)]
            exits = [event.storages for event in call_events if isinstance(event, Exit)]
            # Note: the first and the last one are the module's own, others those of modules inside.
            _number(exchanged, _INPUTS, enters[0] if enters else ())
            _number(exchanged, _OUTPUTS, exits[-1] if exits else ())
            own_storages.update(
                storage for storage in made_storages if storage not in exchanged
            )
        # Note: stubs have no events of their own, so the fold is that of the call that ran.
        if not call_frame.stub and window.phase not in self.parts.get(call_frame.fold, {}):
            inside_number = renumbered(exchanged)
            events = tuple(
                rewritten(event, str, inside_number)
                for event in self.level(window.log, call_frame)
            )
            self.parts.setdefault(call_frame.fold, {})[window.phase] = events
        exchanged_pairs = tuple((inside, outside) for outside, inside in exchanged.items())
        # Note: storages that only the module knows are freed inside the fold, all others here.
        outside_freed = [
            storage
            for storage in freed_storages
            if storage not in own_storages
            and (storage in exchanged or storage not in made_storages)
        ]
        exchanged_freed = tuple(
            exchanged[storage] for storage in freed_storages if storage in exchanged
        )
        return [
            Call(
                call_frame.fold,
                call_frame.path[prefix:],
                window.phase,
                call_frame.number,
                exchanged_pairs,
                exchanged_freed,
            ),
            *map(Free, outside_freed),
        ]

    def check_backwards(self) -> None:
        """Raise unless all modules of a fold have equal backwards."""
        wrong_paths: set[str] = set()
        for by_path in self._backwards.values():
            # Why they differ: if several modules read a tensor, autograd adds its gradients in the
            # backward of all but the module that runs first.
            # Note: most of them may be folded; the first of these then represents the others.
            shapes = Counter(map(frozenset, by_path.values()))
            usual_shape, _ = shapes.most_common(1)[0]
            wrong_paths.update(
                path for path, shape in by_path.items() if shape != usual_shape
            )
        if wrong_paths:
            raise CannotFoldError(wrong_paths)

    def _check(self, window: _Window, given: Sequence[int], left: Sequence[int]) -> None:
        """Raise unless backward of a module inside a folded one is that of its fold."""
        frame, events = window.frame, [event for _, _, event in window.log]
        left_sizes = [self._sizes[storage] for storage in left]
        if frame.stub:
            is_same = not any(isinstance(event, Op) for event in events)
        else:
            # Why not without any left: then all of backward ends here, and other storages with it.
            is_same = not left or frame.output_grads.issuperset(given)
            given = [storage for storage in given if storage in frame.output_grads]
        if (
            not is_same
            or len(given) > 1
            or self._left.setdefault(frame.fold, left_sizes) != left_sizes
        ):
            raise CannotFoldError

    # Note: a stub's backward makes gradients of inputs, though those of the fold may have been made
    # elsewhere.
    def completed(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events, with storages that a call leaves behind and its fold doesn't know."""
        for event in events:
            if isinstance(event, Call):
                fold_part = self.parts.get(event.fold, {}).get(event.phase, ())
                made_storages = {
                    part_event.storage
                    for part_event in fold_part
                    if isinstance(part_event, Alloc)
                }
                for part_event in fold_part:  # a call inside it makes what it leaves behind
                    if isinstance(part_event, Call) and part_event.phase == "backward":
                        made_storages.update(
                            there
                            for own_number, there in part_event.exchanged
                            if own_number <= _MADE
                        )
                for inside, outside in event.exchanged:
                    if (
                        event.phase == "backward"
                        and inside <= _MADE
                        and inside not in made_storages
                    ):
                        yield Alloc(outside, self._sizes.get(outside, 0))
            yield event


def _number(exchanged: dict[int, int], start: int, storages: Iterable[int]) -> None:
    for place, storage in enumerate(dict.fromkeys(storages)):
        exchanged.setdefault(storage, start - place)


# --- stubs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A module that ran, as a stub repeats it.

    Attributes:
        fold: index of its fold.
        outputs: the form of each output tensor.
        build: from output tensors and the inputs to the module's result.
        kept_inputs: positions of the input tensors that autograd kept.
        kept_outputs: positions of the output tensors that autograd kept.
        reads: attributes that differ in its kind, and that it read: place in ``order_below``, name
            and value.
    """

    fold: int
    outputs: tuple[Form, ...]
    build: Callable[[Sequence[Any], Sequence[Any]], Any]
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    reads: tuple[tuple[int, str, Hashable], ...]


class Stub(torch.autograd.Function):
    """``Stub.apply(traced, recorder, anchor, *inputs)``: outputs of a module's form.

    The anchor requires a gradient, so the outputs do too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        traced: Traced,
        recorder: Recorder,
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        outs = tuple(form.empty() for form in traced.outputs)
        # Note: what the module would keep for backward stays alive for as long.
        ctx.save_for_backward(
            *(inputs[i] for i in traced.kept_inputs),
            *(outs[i] for i in traced.kept_outputs),
        )
        ctx.mark_non_differentiable(
            *(
                out
                for out, form in zip(outs, traced.outputs, strict=True)
                if not form.requires_grad
            )
        )
        ctx.set_materialize_grads(False)
        ctx.forms, ctx.recorder = [Form.of(tensor) for tensor in inputs], recorder
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.recorder.touch()
        # Note: unpacking may run a checkpoint, as the module's own backward would.
        kept_tensors = ctx.saved_tensors
        needed_forms = zip(ctx.forms, ctx.needs_input_grad[3:], strict=True)
        form_gradients = [
            form.gradient(grads) if is_needed else None for form, is_needed in needed_forms
        ]
        # Note: the gradients exist while what was saved is still there.
        del kept_tensors
        return None, None, None, *form_gradients
