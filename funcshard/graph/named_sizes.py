"""The sizes of a batch that later calls may change."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import CodeType
from typing import Any

import torch

from funcshard._utils import tree

Names = tuple[str | None, ...]  # of each dim of a tensor; ``None`` for a dim of a fixed size


class NamedSizes:
    """The names that ``trace(dynamic_shapes=...)`` gives to dims of the batch.

    ``spec`` is that argument; ``None`` gives no names.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        _check_spec(spec)
        # By form of the arguments: the text of each leaf.
        self._known_texts: dict[Any, dict[int, str]] = {}

    def of(self, leaves: Sequence[Any], form: Any) -> dict[int, Names]:
        """Return the names of dims by leaf of ``(state, batch)``."""
        if self.spec is None:
            return {}
        # Why kept: the next batches have this form too, and each call asks.
        text_of_leaf = self._known_texts.get(form)
        if text_of_leaf is None:
            _, batch = tree.build_form(form, range(form.num_leaves))
            text_of_leaf = self._known_texts[form] = dict(_spread(self.spec, batch, "batch"))
        return {
            leaf_index: _names(dims_text, leaves[leaf_index])
            for leaf_index, dims_text in text_of_leaf.items()
            if isinstance(leaves[leaf_index], torch.Tensor)
        }


def _check_spec(spec: Any) -> None:
    if isinstance(spec, str):
        _parse_names(spec)
    elif isinstance(spec, Mapping):
        _check_spec(list(spec.values()))
    elif isinstance(spec, tuple | list):
        for sub_spec in spec:
            _check_spec(sub_spec)
    elif spec is not None:
        raise TypeError(
            "dynamic_shapes is a text such as 'b, ...', or a tree of texts and None in the form "
            f"of the batch; found {type(spec).__name__}"
        )


def _parse_names(text: str) -> tuple[list[str | None], bool]:
    """Return the names in a text, and whether further dims may follow."""
    dim_names = [part.strip() for part in text.split(",")]
    has_more = dim_names[-1] == "..."
    if has_more:
        dim_names.pop()
    for name in dim_names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(
                "dynamic_shapes names the sizes that may change: 'b, ...' for dim 0, 'b, t' for "
                "two dims, with _ for a fixed one and ... at the end for all further ones; found "
                f"{text!r}"
            )
    return [None if name == "_" else name for name in dim_names], has_more


def _spread(spec: Any, batch: Any, path: str) -> Iterator[tuple[int, str]]:
    """Yield the text for each leaf of a batch."""
    if spec is None:
        return
    if isinstance(spec, str):
        yield from dict.fromkeys(tree.leaves(batch), spec).items()
        return
    if isinstance(spec, Mapping):
        fits = isinstance(batch, Mapping) and batch.keys() == spec.keys()
        keys: Iterable[Any] = spec
    else:
        fits = isinstance(batch, tuple | list) and len(batch) == len(spec)
        keys = range(len(spec))
    if not fits:
        raise ValueError(
            "dynamic_shapes has the form of the batch, with a text or None for each part; found "
            f"{_described(spec)} for `{path}`, which is {_described(batch)}"
        )
    for key in keys:
        yield from _spread(spec[key], batch[key], f"{path}[{key!r}]")


def _described(node: Any) -> str:
    if isinstance(node, Mapping):
        return f"a dictionary with the keys {sorted(map(str, node))}"
    if isinstance(node, tuple | list):
        return f"a {type(node).__name__} of {len(node)}"
    return "one leaf"


def _names(text: str, tensor: torch.Tensor) -> Names:
    dim_names, has_more = _parse_names(text)
    if len(dim_names) > tensor.ndim or (len(dim_names) < tensor.ndim and not has_more):
        raise ValueError(
            f"dynamic_shapes={text!r} names {len(dim_names)} dims; found a tensor of shape "
            f"{list(tensor.shape)} in the batch: pass a tree of texts in the form of the batch, "
            "with None for tensors of fixed shapes, and '...' for further dims"
        )
    return tuple(dim_names) + (None,) * (tensor.ndim - len(dim_names))


def sizes_of(leaves: Sequence[Any], names: Mapping[int, Names]) -> dict[str, int]:
    """Return the size of each name in the leaves; raise ``ValueError`` if two differ."""
    sizes_by_name: dict[str, int] = {}
    for leaf_index, named_dims in names.items():
        for name, size in zip(named_dims, leaves[leaf_index].shape, strict=True):
            if name is not None and sizes_by_name.setdefault(name, size) != size:
                raise ValueError(
                    f"dynamic_shapes gives the name {name!r} to dims of one size; found the sizes "
                    f"{sizes_by_name[name]} and {size} in the batch: give them two names"
                )
    return sizes_by_name


# --- conditions -----------------------------------------------------------------------------------

# All that a condition may consist of, besides names, numbers and calls of these functions.
_ARITHMETIC = (
    ast.Expression, ast.Name, ast.Load, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Div,
    ast.UnaryOp, ast.Not, ast.USub, ast.BoolOp, ast.And, ast.Or,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
_FUNCTIONS = {"min": min, "max": max, "abs": abs, "float": float, "int": int}
_LONGEST = 2000  # characters; a condition of torch has some dozens


@dataclass(frozen=True, slots=True)
class Conditions:
    """Comparisons that the sizes of a batch have to fulfil.

    Attributes:
        texts: the conditions as Python code, such as ``"b % 2 == 0"``.
    """

    texts: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    _codes: tuple[CodeType, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_codes", tuple(map(_compiled, self.texts)))

    def failing(self, sizes: Mapping[str, int]) -> str:
        """Return the first condition that sizes don't fulfil, with its place, or ``""``."""
        # Why no builtins: eval would add all of them, __import__ too.
        known_values = {"__builtins__": {}, **sizes}
        known_values |= {f"{name}()": function for name, function in _FUNCTIONS.items()}
        for text, place, code in zip_longest(self.texts, self.places, self._codes, fillvalue=""):
            if not eval(code, known_values):
                return f"{text} ({place})" if place else text
        return ""


def _compiled(text: str) -> CodeType:
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters")
        parsed_text = ast.parse(text, mode="eval")
        for node in ast.walk(parsed_text):
            # Why: a file must not run other code than arithmetic.
            _check_node(node)
        return compile(parsed_text, "<condition>", "eval", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(
            f"found the condition {text[:60]!r}, which is no comparison of sizes: {error}"
        ) from None


def _check_node(node: ast.AST) -> None:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float, bool):
            pass
        case ast.Call(func=ast.Name(id=name) as func, args=[_, *_], keywords=[]) if (
            name in _FUNCTIONS
        ):
            func.id = f"{name}()"  # because a size may have the name of a function
        case _ if not isinstance(node, _ARITHMETIC):
            raise ValueError(type(node).__name__)
