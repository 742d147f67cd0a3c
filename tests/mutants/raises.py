"""Which errors with a text no test raises, by the coverage that ``cover`` wrote."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.covering import DATA

__all__ = ["unreached"]


def unreached(root: Path, folder: Path) -> Iterator[str]:
    """Yield each ``raise`` of an error with a text that no test runs: file, line and statement.

    Lines that run in other processes leave no trace, so a few of these have a test after all.

    Arguments:
        root: the root of the repository.
        folder: the folder that ``cover`` wrote to.
    """
    import coverage

    data = coverage.CoverageData(basename=str(folder / DATA))
    data.read()
    for path in sorted((root / "funcshard").rglob("*.py")):
        reached = set(data.lines(str(path)) or ())
        for node in ast.walk(ast.parse(path.read_text())):
            has_text = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
            if has_text and reached.isdisjoint(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
                yield f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}"
