"""Faults as data: where each lies, and what it changes.

A ``Fault`` names a file, a function and a piece of its text, not a line. So it survives changes
around it, and ``planted`` says when its place has gone.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Fault", "Site", "load", "places", "planted", "save", "sites", "with_fault"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One change that makes the library wrong.

    Attributes:
        file: the path of the file from the root of the repository.
        function: the qualified name of the function, such as ``GradReducer.add``.
        kind: what is wrong, such as ``"comparison flipped"``.
        before: the text that is replaced, as ``ast.unparse`` writes it.
        after: the text in its place.
        number: which of the equal texts in the function it is.
        equivalent: why no test can tell the difference; empty if one can.
        first_test: how the name of the test begins that runs first, because it runs the lines in
            other processes, which leave no coverage, or is slower than the budget; empty if none.
    """

    file: str
    function: str
    kind: str
    before: str
    after: str
    number: int = 0
    equivalent: str = ""
    first_test: str = ""

    @property
    def title(self) -> str:
        """The fault in one line."""
        before, after = (" ".join(text.split())[:60] for text in (self.before, self.after))
        return f"{self.file}::{self.function}: {self.kind}: {before} → {after}"


@dataclass(frozen=True)
class Site:
    """A node of a function, with its place in the text."""

    function: str
    node: ast.expr | ast.stmt
    parent: ast.AST
    number: int  # of the nodes of the function with an equal text


def load(path: Path) -> list[Fault]:
    """Return the faults of a file."""
    return [Fault(**row) for row in json.loads(path.read_text())]


def save(path: Path, faults: Iterable[Fault]) -> None:
    """Write faults to a file, without the fields that have their defaults."""
    rows = [{key: value for key, value in asdict(fault).items() if value not in ("", 0)} for fault in faults]
    path.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")


def sites(tree: ast.Module, functions: Collection[str] | None = None) -> Iterator[Site]:
    """Yield the expressions and statements of functions of a file, in the order of the text.

    Arguments:
        tree: the file.
        functions: qualified names of the functions; by default all of them.
    """

    def visit(node: ast.AST, names: tuple[str, ...], parent: ast.AST, counts: dict[str, int]) -> Iterator[Site]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names, inside = (*names, node.name), {}
            for child in node.body:
                # Why not the rest of it: annotations and decorators are no behaviour.
                yield from visit(child, names, node, inside if isinstance(node, ast.FunctionDef) else counts)
            return
        wanted = functions is None or ".".join(names) in functions
        if isinstance(node, ast.expr | ast.stmt) and names and wanted:
            text = ast.unparse(node)
            yield Site(".".join(names), node, parent, counts.get(text, 0))
            counts[text] = counts.get(text, 0) + 1
        for child in ast.iter_child_nodes(node):
            yield from visit(child, names, node, counts)

    for node in tree.body:
        yield from visit(node, (), tree, {})


def places(text: str, faults: Iterable[Fault]) -> dict[Fault, Site]:
    """Return where the faults of a file lie in its text, without those whose place has gone."""
    wanted: dict[tuple[str, str, int], list[Fault]] = {}
    for fault in faults:
        wanted.setdefault((fault.function, fault.before, fault.number), []).append(fault)
    found: dict[Fault, Site] = {}
    for site in sites(ast.parse(text), {function for function, _, _ in wanted}):
        found |= dict.fromkeys(wanted.get((site.function, ast.unparse(site.node), site.number), ()), site)
    return found


def planted(text: str, fault: Fault) -> tuple[str, range] | None:
    """Return a file's text with a fault, and the lines that it changed; ``None`` if its place has gone.

    Arguments:
        text: the text of the file.
        fault: the fault.
    """
    site = places(text, [fault]).get(fault)
    return None if site is None else with_fault(text, fault, site)


def with_fault(text: str, fault: Fault, site: Site) -> tuple[str, range]:
    """Return what ``planted`` does, for a fault whose place is known."""
    node = site.node
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = text.encode().splitlines(keepends=True)  # offsets count bytes
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    after = fault.after.replace("\n", "\n" + " " * node.col_offset)
    whole = text.encode()
    changed = (whole[:begin] + after.encode() + whole[end:]).decode()
    return changed, range(node.lineno, node.end_lineno + 1)
