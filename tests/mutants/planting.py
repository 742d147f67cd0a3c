"""Faults that are drawn by seed: small changes of one operator, constant, name or statement."""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from tests.mutants.faults import Fault, Site, places, planted, sites

__all__ = ["WINGS", "draw", "redraw"]

WINGS = ("core", "plan", "module", "train", "comm", "checkpoint", "estimate", "graph")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_WORDS = {"shard": "replicate", "replicate": "shard", "sum": "mean", "pre": "post"}
_DTYPES = {"float32": "bfloat16", "float64": "float32", "bfloat16": "float16", "int64": "int32", "uint8": "int8"}
# Why: whether a line is logged, shown or remembered is no promise, and texts of errors are judged by people.
_UNSEEN = ("_log", "warnings", "functools", "logging")


def _changed(node: ast.expr, change: Callable[[ast.expr], None]) -> str:
    other = copy.deepcopy(node)
    change(other)
    return ast.unparse(other)


def _of_expression(node: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        yield "comparison flipped", _changed(node, lambda new: setattr(new, "ops", [_COMPARISONS[type(node.ops[0])]()]))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield "and for or", _changed(node, lambda new: setattr(new, "op", other()))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "negation dropped", ast.unparse(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not isinstance(node.left, ast.JoinedStr):
        divides = isinstance(node.op, ast.Div | ast.FloorDiv)
        kind = "wrong divisor" if divides else "wrong operator"
        yield kind, _changed(node, lambda new: setattr(new, "op", _OPERATORS[type(node.op)]()))
    elif isinstance(node, ast.Constant):
        if type(node.value) is bool:
            yield "switch flipped", str(not node.value)
        elif type(node.value) is int and abs(node.value) < 10:
            yield "off by one", str(node.value + 1)
        elif isinstance(node.value, str) and node.value in _WORDS:
            yield "wrong word", repr(_WORDS[node.value])
    elif isinstance(node, ast.Attribute) and node.attr in _DTYPES and ast.unparse(node.value) == "torch":
        yield "wrong dtype", f"torch.{_DTYPES[node.attr]}"


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        waits = "wait" in ast.unparse(node.value.func)
        yield "wait left out" if waits else "statement dropped", "pass"
    elif isinstance(node, ast.AugAssign | ast.Continue) or _stores(node):
        yield "statement dropped", "pass"


def _stores(node: ast.stmt) -> bool:
    """Return whether a statement assigns to attributes or items only, so that no name is missing without it."""
    return isinstance(node, ast.Assign) and all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)


def _checks(node: ast.AST) -> bool:
    """Return whether a node is an ``if`` whose body ends in an error."""
    return isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise)


def _candidates(file: str, site: Site) -> Iterator[Fault]:
    node, text = site.node, ast.unparse(site.node)
    if isinstance(node, ast.expr):
        changes = [*_of_expression(node)]
        if _checks(site.parent) and node is getattr(site.parent, "test", None):
            changes = [("check removed", "False")]
    else:
        changes = [*_of_statement(node)]
    if text.startswith(_UNSEEN):
        return
    for kind, after in changes:
        yield Fault(file=file, function=site.function, kind=kind, before=text, after=after, number=site.number)


def _silent(tree: ast.Module) -> set[int]:
    """Return the ids of nodes in errors, assertions, logs and texts, which are no behaviour."""
    silent = set()
    for node in ast.walk(tree):
        logs = isinstance(node, ast.Expr) and ast.unparse(node).startswith(_UNSEEN)
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or logs:
            silent.update(map(id, ast.walk(node)))
    return silent


def _by_kind(root: Path, wing: str) -> dict[str, list[Fault]]:
    """Return all faults that can be drawn in a wing, by kind."""
    kinds: dict[str, list[Fault]] = defaultdict(list)
    for path in sorted((root / "funcshard" / wing).rglob("*.py")):
        tree = ast.parse(path.read_text())
        silent, file = _silent(tree), str(path.relative_to(root))
        for site in sites(tree):
            if id(site.node) not in silent and not site.function.endswith(("__repr__", "__str__")):
                for fault in _candidates(file, site):
                    kinds[fault.kind].append(fault)
    return kinds


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Draw ``count`` faults of the wings by seed: as many of a wing as it has code, all kinds alike.

    Arguments:
        root: the root of the repository.
        count: the number of faults.
        seed: the seed of the draws.
    """
    draws, faults = Random(seed), []
    candidates = {wing: _by_kind(root, wing) for wing in WINGS}
    sizes = {wing: sum(map(len, kinds.values())) for wing, kinds in candidates.items()}
    for wing, kinds in candidates.items():
        share = round(count * sizes[wing] / sum(sizes.values()))
        for number in range(share):
            kind = sorted(kinds)[number % len(kinds)]
            fault = kinds[kind].pop(draws.randrange(len(kinds[kind])))
            if not kinds[kind]:
                del kinds[kind]
            text = (root / fault.file).read_text()
            changed = planted(text, fault)
            assert changed is not None, fault.title
            compile(changed[0], fault.file, "exec")
            faults.append(fault)
    return faults


def redraw(root: Path, faults: Sequence[Fault], seed: int) -> list[Fault]:
    """Return the faults, with others of the same wing and kind where their place has gone.

    Arguments:
        root: the root of the repository.
        faults: the faults.
        seed: the seed of the draws.
    """
    draws, found = Random(seed), list(faults)
    candidates: dict[str, dict[str, list[Fault]]] = {}
    for number, fault in enumerate(faults):
        path = root / fault.file
        if path.exists() and places(path.read_text(), [fault]):
            continue
        wing = fault.file.split("/")[1]
        if wing not in candidates:
            candidates[wing] = _by_kind(root, wing)
        of_kind = candidates[wing].get(fault.kind) or [each for kind in candidates[wing].values() for each in kind]
        found[number] = draws.choice([each for each in of_kind if each not in found])
    return found
