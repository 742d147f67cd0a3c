"""Run the whole zoo and print its table: ``python -m tests.zoo [--names GLOB] [--every TASK] [--verbs] ...``."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib.metadata
import importlib.util
import itertools
import pathlib
import sys
import time
import warnings
from collections.abc import Callable

import torch

from tests.zoo.every_transformer import TASKS, every_subject
from tests.zoo.law import STRATEGIES, Subject, check
from tests.zoo.subjects import SUBJECTS
from tests.zoo.verbs import verbs_of

__all__ = ["main"]


def problem_of(run: Callable[[], list[str] | None]) -> str:
    """Return what went wrong in one line, or ``""``."""
    try:
        problems = run()
    except Exception as error:  # the table has a row for each model, whatever it raises
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"{len(problems)} differences: {problems[0]}" if problems else ""


def runs_of(subject: Subject, verbs: bool) -> list[tuple[str, Callable[[], list[str] | None]]]:
    if verbs:
        return [*verbs_of(subject).items()] * 2
    return [(strategy, functools.partial(check, subject, strategy)) for strategy in STRATEGIES]


def version_of(package: str) -> str:
    for distribution in importlib.metadata.packages_distributions().get(package, []):
        return f"{distribution} {importlib.metadata.version(distribution)}"
    return package


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--names", default="*", help="a glob of names")
    parser.add_argument("--every", choices=TASKS, help="all other models of transformers for a task, in place of the zoo")
    parser.add_argument("--verbs", action="store_true", help="profile, record, differentiate, recompute and save instead")
    parser.add_argument("--markdown", type=pathlib.Path, help="where to write the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, failed = [], 0
    for subject in every_subject(options.every) if options.every else SUBJECTS:
        if not fnmatch.fnmatch(subject.name, options.names):
            continue
        if not importlib.util.find_spec(subject.package):
            print(f"{subject.name}: {subject.package} is not installed", flush=True)
            continue
        began = time.perf_counter()
        problems = [f"{name}: {problem}" for name, run in runs_of(subject, options.verbs) if (problem := problem_of(run))]
        failed += bool(problems)
        text = "; ".join(problems) or "equal"
        print(f"{subject.package}, {subject.name}: {text} ({time.perf_counter() - began:.1f} s)", flush=True)
        rows.append((version_of(subject.package), subject.name, text))
    print(f"{len(rows) - failed} of {len(rows)} models equal themselves")
    if options.markdown:
        lines = ["| package | models | result |", "|---|---|---|"]
        for package, group in itertools.groupby(rows, key=lambda row: row[0]):
            models = [row[1:] for row in group]
            names = ", ".join(dict.fromkeys(name for name, _ in models))
            wrong_models = "; ".join(f"{name}: {text}" for name, text in models if text != "equal")
            lines.append(f"| {package} | {names} | {wrong_models or 'equal'} |")
        options.markdown.write_text("\n".join(lines) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
