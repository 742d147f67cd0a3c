"""``Conditions``: comparisons that hold for the sizes of a batch if a graph serves them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "float": float,
    "int": int,
}
_LONGEST = 2000  # characters; a condition of torch has some dozens


@dataclass(frozen=True, slots=True)
class Conditions:
    """Comparisons that hold for the sizes of a batch if a graph serves them.

    Attributes:
        texts: the conditions as Python code, such as ``"b % 2 == 0"``: comparisons and arithmetic.
        places: the place of the code that made each; empty if that is not known.

    Raises:
        ValueError: a text is no such code.
    """

    texts: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    _parsed: tuple[ast.expr, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_parsed", tuple(map(_parse, self.texts)))

    def failing(self, sizes: Mapping[str, int]) -> str:
        """Return the first condition that sizes do not fulfil, with its place; ``""`` for none."""
        for condition_index, parsed in enumerate(self._parsed):
            if not _value(parsed, sizes):
                place = self.places[condition_index] if condition_index < len(self.places) else ""
                return (
                    f"{self.texts[condition_index]} ({place})"
                    if place
                    else self.texts[condition_index]
                )
        return ""


def _parse(text: str) -> ast.expr:
    """Return code as a tree, or raise: reading a file must not run other code than arithmetic."""
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters")
        parsed = ast.parse(text, mode="eval").body
        _check(parsed)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(
            f"found the condition {text[:60]!r}, which is no comparison of sizes: {error}"
        ) from None
    return parsed


def _check(node: ast.expr) -> None:
    match node:
        case ast.Name():
            return
        case ast.Constant(value=value) if type(value) in (int, float, bool):
            return
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            parts = [left, right]
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            type(op) in _OPERATORS for op in ops
        ):
            parts = [left, *others]
        case ast.BoolOp(values=parts):
            pass
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            parts = [operand]
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as parts, keywords=[]) if (
            name in _FUNCTIONS
        ):
            pass
        case _:
            raise ValueError(type(node).__name__)
    for part in parts:
        _check(part)


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    match node:
        case ast.Name(id=name):
            return sizes[name]
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(each, sizes) for each in (left, *others)]
            return all(_OPERATORS[type(op)](values[i], values[i + 1]) for i, op in enumerate(ops))
        case ast.BoolOp(op=op, values=parts):
            return (all if isinstance(op, ast.And) else any)(_value(part, sizes) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, sizes)
        case ast.UnaryOp(operand=operand):
            return -_value(operand, sizes)
        case ast.Call(func=ast.Name(id=name), args=parts):
            return _FUNCTIONS[name](*[_value(part, sizes) for part in parts])
    raise AssertionError("_check lets no other node through")
