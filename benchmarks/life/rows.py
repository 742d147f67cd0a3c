"""All cases, in the order of the table."""

from __future__ import annotations

import importlib

from benchmarks.life.case import Case

__all__ = ["FILES", "cases", "find"]

# Files of this package with a tuple CASES. Why names: a fresh rank imports the file of its case and
# no other, because libraries that other cases import would count as loaded.
FILES: tuple[str, ...] = ("start", "building", "states", "checkpoints", "helpers", "transforms", "simulated", "peaks")


def cases() -> dict[str, tuple[str, Case]]:
    """Return (file, case) by the case's name."""
    found: dict[str, tuple[str, Case]] = {}
    for file in FILES:
        for case in importlib.import_module(f"benchmarks.life.{file}").CASES:
            assert case.name not in found, f"two cases have the name {case.name!r}"
            found[case.name] = (file, case)
    return found


def find(file: str, name: str) -> Case:
    """Return the case of a name from its file."""
    found: Case = next(case for case in importlib.import_module(f"benchmarks.life.{file}").CASES if case.name == name)
    return found
