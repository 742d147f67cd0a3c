"""Fold a log: the events of a module that represents others are kept once.

The tracer's log has all events in order, each with the call that it belongs to. ``fold`` turns it
into a tape. A call of a folded module becomes one ``Call`` event for its forward and one for its
backward, and the events of the module that really ran become the parts of the ``Fold``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from funcshard.estimate.trace.recorder import Frame
from funcshard.estimate.trace.tape import (
    Alloc,
    At,
    Call,
    Enter,
    Event,
    Exit,
    Fold,
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
    """Some modules of a trace are called in ways in which no other one can represent them.

    Attributes:
        depth: 1 if modules inside other folded ones may not be folded, 0 if none may, and 2 if only
            those at the paths may not.
        paths: paths of modules that may not be folded.
    """

    def __init__(self, depth: int, paths: Iterable[str] = ()) -> None:
        super().__init__(depth)
        self.depth = depth
        self.paths = frozenset(paths)


def fold_log(log: Log, paths: Sequence[str]) -> Tape:
    """Return the tape of a log.

    Arguments:
        log: the events in order, each with its call and its phase.
        paths: path of the module that represents each fold.

    Raises:
        CannotFoldError: backward of a module is not that of the one that represents it.
    """
    folder = _Folder(log)
    events = folder.level(log, None)
    folder.check_backwards(paths)
    folds = []
    for fold_index, path in enumerate(paths):
        parts = {
            phase: tuple(folder.completed(part))
            for phase, part in folder.parts.get(fold_index, {}).items()
        }
        folds.append(Fold(path, parts))
    return Tape(tuple(folder.completed(events)), tuple(folds))


@dataclass(slots=True)
class _Window:
    """The events of one phase of one call of a folded module.

    Attributes:
        frame: the call.
        phase: the part of the fold.
        log: the events.
    """

    frame: Frame
    phase: str
    log: list[tuple[Frame, str, Event]] = field(default_factory=list)


class _Folder:
    """Folds a log level by level.

    Attributes:
        parts: the parts of each fold, by its index.
    """

    def __init__(self, log: Log) -> None:
        self.parts: dict[int, dict[str, tuple[Event, ...]]] = {}
        self._sizes = {
            event.storage: event.bytes for _, _, event in log if isinstance(event, Alloc)
        }
        # By number of a call: storage outside -> inside.
        self._exchanged: dict[int, dict[int, int]] = {}
        # By fold: bytes of storages that backward leaves.
        self._left: dict[int | None, list[int]] = {}
        self._own: dict[int, set[int]] = {}  # by number of a call: storages that its forward made
        # By fold and path: what each backward leaves and takes, and the forms of gradients.
        self._backwards: dict[int, dict[str, set[Hashable]]] = {}

    def level(self, log: Log, root: Frame | None) -> list[Event]:
        """Return the events of a call without those of folded calls inside it.

        Arguments:
            log: the events of the call, those of calls inside it included.
            root: the call; ``None`` for the whole log.
        """
        prefix = len(root.path) + 1 if root is not None and root.path else 0

        def relative(path: str) -> str:
            return path[prefix:]

        events: list[Event | _Window] = []
        windows: dict[tuple[int, str], _Window] = {}
        where: tuple[str, str] | None = None
        for frame, phase, event in log:
            folded = _outermost_fold(frame, root)
            if folded is not None:
                part = "forward"
                if phase == "backward":
                    part = "recompute" if folded.again else "backward"
                window = windows.get((folded.number, part))
                if window is None:
                    window = windows[folded.number, part] = _Window(folded, part)
                    events.append(window)
                    where = None
                window.log.append((frame, phase, event))
                continue
            if where != (frame.path, phase) and not isinstance(event, Free):
                where = frame.path, phase
                events.append(At(frame.path[prefix:], phase))
            events.append(rewritten(event, relative, int) if prefix else event)
        folded_events: list[Event] = []
        for each in events:
            folded_events += self._call(each, prefix) if isinstance(each, _Window) else [each]
        return folded_events

    def _call(self, window: _Window, prefix: int) -> list[Event]:
        """Return the call of a window, and the frees that follow it."""
        frame, call_events = window.frame, [event for _, _, event in window.log]
        assert frame.fold is not None, "a window is that of a folded call"
        exchanged = self._exchanged.setdefault(frame.number, {})
        mine = self._own.setdefault(frame.number, set())
        made_storages = [event.storage for event in call_events if isinstance(event, Alloc)]
        freed = [event.storage for event in call_events if isinstance(event, Free)]
        if window.phase == "backward":
            grads = {event.storage for event in call_events if isinstance(event, Grad)}
            known_storages = {*made_storages, *exchanged, *mine}
            given_storages = [storage for storage in freed if storage not in known_storages]
            given_storages.sort(key=lambda each: each not in frame.output_grads)
            left_storages = [
                storage
                for storage in made_storages
                if storage not in freed and storage not in grads
            ]
            _number(exchanged, _GIVEN, given_storages)
            _number(exchanged, _MADE, left_storages)
            if _fold_around(frame) is not None:
                self._check(window, given_storages, left_storages)
            else:
                sizes = tuple(self._sizes[storage] for storage in left_storages)
                backwards = self._backwards.setdefault(frame.fold, {}).setdefault(frame.path, set())
                more_given = len(
                    [storage for storage in given_storages if storage not in frame.output_grads]
                )
                backwards.add((sizes, more_given, tuple(frame.grad_forms)))
        else:
            inputs = next((event.storages for event in call_events if isinstance(event, Enter)), ())
            outputs = next(
                (event.storages for event in reversed(call_events) if isinstance(event, Exit)), ()
            )
            _number(exchanged, _INPUTS, inputs)
            _number(exchanged, _OUTPUTS, outputs)
            mine.update(storage for storage in made_storages if storage not in exchanged)
        if not frame.stub and window.phase not in self.parts.get(frame.fold, {}):
            inside = renumbered(exchanged)
            events = tuple(rewritten(event, str, inside) for event in self.level(window.log, frame))
            self.parts.setdefault(frame.fold, {})[window.phase] = events
        pairs = tuple((inside, outside) for outside, inside in exchanged.items())
        outside = [
            storage
            for storage in freed
            if storage not in mine and (storage in exchanged or storage not in made_storages)
        ]
        gone = tuple(exchanged[storage] for storage in freed if storage in exchanged)
        return [
            Call(frame.fold, frame.path[prefix:], window.phase, frame.number, pairs, gone),
            *map(Free, outside),
        ]

    def check_backwards(self, paths: Sequence[str]) -> None:
        """Raise unless the backward of each module is that of the one that represents it.

        Autograd adds the gradients of a tensor that several modules read in the backward of one of
        them: of all but that which runs first.

        Arguments:
            paths: path of the module that represents each fold.
        """
        wrong: set[str] = set()
        for fold, backwards in self._backwards.items():
            own_backward = backwards.get(paths[fold])
            others = {
                path for path, backward_shape in backwards.items() if backward_shape != own_backward
            }
            # Why the fold's own: if it is the odd one out, another one may stand for the rest.
            wrong |= others if 2 * len(others) < len(backwards) else {paths[fold]}
        if wrong:
            raise CannotFoldError(2, wrong)

    def _check(self, window: _Window, given: Sequence[int], left: Sequence[int]) -> None:
        """Raise unless backward of a module inside a folded one is that of its fold.

        Autograd adds the gradients of a tensor that several modules read in the backward of one of
        them. Then the modules differ.
        """
        frame, events = window.frame, [event for _, _, event in window.log]
        sizes = [self._sizes[storage] for storage in left]
        if frame.stub:
            same = not any(isinstance(event, Op) for event in events)
        else:
            # Why not without any left: then all of backward ends here, and other storages with it.
            same = not left or frame.output_grads.issuperset(given)
            given = [storage for storage in given if storage in frame.output_grads]
        if not same or len(given) > 1 or self._left.setdefault(frame.fold, sizes) != sizes:
            raise CannotFoldError(1)

    def completed(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events, with storages that a call leaves behind and its fold does not know."""
        for event in events:
            if isinstance(event, Call):
                part = self.parts.get(event.fold, {}).get(event.phase, ())
                makes = {each.storage for each in part if isinstance(each, Alloc)}
                for each in part:  # a call inside it makes what it leaves behind
                    if isinstance(each, Call) and each.phase == "backward":
                        makes.update(
                            there for own_number, there in each.exchanged if own_number <= _MADE
                        )
                for inside, outside in event.exchanged:
                    if event.phase == "backward" and inside <= _MADE and inside not in makes:
                        yield Alloc(outside, self._sizes.get(outside, 0))
            yield event


def _number(exchanged: dict[int, int], start: int, storages: Iterable[int]) -> None:
    """Give numbers inside the fold to storages that have none yet."""
    for place, storage in enumerate(dict.fromkeys(storages)):
        exchanged.setdefault(storage, start - place)


def _outermost_fold(frame: Frame, root: Frame | None) -> Frame | None:
    """Return the outermost folded call below ``root`` that contains a call."""
    outermost_frame = None
    outer_frame: Frame | None = frame
    while outer_frame is not None and outer_frame is not root:
        if outer_frame.fold is not None:
            outermost_frame = outer_frame
        outer_frame = outer_frame.parent
    return outermost_frame


def _fold_around(frame: Frame) -> Frame | None:
    """Return the innermost folded call around a call."""
    outer_frame = frame.parent
    while outer_frame is not None and outer_frame.fold is None:
        outer_frame = outer_frame.parent
    return outer_frame
