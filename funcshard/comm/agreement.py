"""Compare texts between ranks, so that they check arguments together before they move data."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from funcshard._utils.torch_private import unseen
from funcshard.comm.attempts import UNDO
from funcshard.comm.group import Group
from funcshard.plan import current_recording

_REMEDY = "build it from the same arguments everywhere"
_SOME = "a function"
_NONE = "None"


class Ranks(Protocol):
    """The part of a mesh that an exchange of texts needs."""

    @property
    def axes(self) -> tuple[tuple[str, Group], ...]:
        """Name and group of each axis with more than one rank, the last axis first."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def memo(self) -> dict[Any, Any]:
        """What the ranks have done together; here the texts that they have found to be equal."""


def check_all_same(
    mesh: Ranks, texts: Mapping[str, str], label: str = "", *, remedy: str = _REMEDY
) -> None:
    """Raise ``ValueError`` on every rank unless all ranks of ``mesh`` pass the same ``texts``.

    Every rank has to call this.

    Arguments:
        mesh: the ranks.
        texts: the texts to compare, in this order; those of functions come from ``text_of``.
        label: the purpose, for errors about a rank that calls something else; by default the names.
        remedy: what to do, for the error.
    """
    # Why every rank first reads every text: a rank that raised before the last collective would
    # leave the ranks that wait in it.
    rank_texts = all_gather_texts(
        mesh, json.dumps(dict(texts)), label or "a comparison of " + ", ".join(texts)
    )
    if len(set(rank_texts)) > 1:
        first_error = first_difference(
            [json.loads(rank_text) for rank_text in rank_texts],
            range(len(rank_texts)),
            remedy=remedy,
        )
        if first_error:
            raise ValueError(first_error)


def check_once(mesh: Ranks, texts: Mapping[str, str], label: str) -> None:
    """Do what ``check_all_same`` does, unless these texts of this mesh were equal before."""
    known_call = json.dumps([label, dict(texts), [axis for axis, _ in mesh.axes]])
    # Note: ranks whose texts differ are found all the same, because those that know their text
    # issue another collective than the rest.
    if mesh.world_size == 1 or known_call in mesh.memo or current_recording() is not None:
        return
    check_all_same(mesh, texts, label)
    # Why only now: ranks that differ have raised, and compare again next time.
    mesh.memo[known_call] = True
    undo = UNDO.get()
    # Why undone: a rank that failed before this would compare alone next time.
    if undo is not None:
        undo.append(lambda: mesh.memo.pop(known_call, None))


def first_difference(
    rows: Sequence[Mapping[str, str]], ranks: Sequence[int], *, remedy: str = _REMEDY
) -> str:
    """Return an error message about the first difference between ranks; ``""`` for none."""
    for row_name in dict.fromkeys(text_name for row in rows for text_name in row):
        own_text = rows[0].get(row_name, "nothing")
        for rank, row in zip(ranks, rows, strict=True):
            other_text = row.get(row_name, "nothing")
            if own_text != other_text and not _may_be_the_same(own_text, other_text):
                own_text, other_text = around_difference(own_text, other_text)
                return (
                    f"{row_name} must be the same on every rank; rank {ranks[0]} has {own_text} "
                    f"and rank {rank} has {other_text}: {remedy}"
                )
    return ""


def around_difference(one: str, other: str) -> tuple[str, str]:
    """Return the parts of two texts around their first difference."""
    # Note: long texts differ far behind their beginning, such as two configurations.
    pairs = enumerate(zip(one, other, strict=False))
    # One text may begin with the whole other one, as two paths do.
    shorter = min(len(one), len(other))
    begin = max(0, next((i for i, (a, b) in pairs if a != b), shorter) - 40)
    one_part, other_part = [
        "…" * (begin > 0) + long_text[begin : begin + 80] for long_text in (one, other)
    ]
    return one_part, other_part


def text_of(value: Any) -> str:
    """Return a text of an argument that ranks can compare, the same in every process.

    A function at the top of a module is compared by its name; any other one may equal any function.
    """
    if isinstance(value, functools.partial):
        function_text = text_of(value.func)
        if function_text == _SOME:
            return function_text
        arguments = [*map(text_of, value.args)]
        arguments += [
            f"{name}={text_of(item)}" for name, item in sorted(value.keywords.items())
        ]
        return f"{function_text}({', '.join(arguments)})"
    if isinstance(value, Mapping):
        # Why sorted: a program may make it from a set, whose order differs between processes.
        item_texts = sorted(
            f"{text_of(key)}: {text_of(item)}" for key, item in value.items()
        )
        return f"{{{', '.join(item_texts)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, set | frozenset):
        return f"[{', '.join(sorted(map(text_of, value)))}]"
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return repr(value.item())
    if value is None or isinstance(value, str | bytes | bool | int | float | complex):
        return repr(value)
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if callable(value):
        return f"{module}.{name}" if module and name and "<" not in name else _SOME
    # Note: a data class itself is callable, so what comes here is an instance of one.
    if dataclasses.is_dataclass(value):
        field_names = [class_field.name for class_field in dataclasses.fields(value)]
        field_values = {
            field_name: getattr(value, field_name) for field_name in field_names
        }
        return f"{type(value).__name__}({text_of(field_values)})"
    if isinstance(value, torch.dtype | torch.device | enum.Enum):
        return str(value)
    # Why no other text: that of an object may hold its address.
    return f"a {type(value).__name__}"


def _may_be_the_same(own: str, other: str) -> bool:
    # Why not None: a rank without a function differs from one that has any function.
    return _SOME in (own, other) and _NONE not in (own, other)


@unseen
def all_gather_texts(mesh: Ranks, text: str, label: str = "") -> list[str]:
    """Return every rank's ``text``, in order of ranks; each rank of ``mesh`` has to call this.

    ``label`` is the purpose, for errors about ranks that issue something else.
    """
    if current_recording() is not None:  # ranks that trace a step exchange nothing
        return [text] * mesh.world_size
    texts = [text]
    for _, group in mesh.axes:  # the last axis first, which gives the order of ranks
        # Why one for all: the message then does not grow with the ranks of the axes before, and a
        # thousand equal messages are read once.
        texts_before = len(texts)
        # All ranks along the axes before agree, so one text speaks for them.
        if len(set(texts)) == 1:
            texts = texts[:1]
        group_messages = group.all_gather_text(json.dumps(texts), label=label)
        texts_of = {
            group_message: json.loads(group_message)
            for group_message in set(group_messages)
        }
        texts = []
        for group_message in group_messages:
            # Note: all ranks had equally many texts before, so a lone one is repeated.
            texts += texts_of[group_message] * (
                texts_before // len(texts_of[group_message])
            )
    return texts
