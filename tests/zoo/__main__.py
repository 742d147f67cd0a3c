"""Run the whole zoo and print its table: ``python -m tests.zoo [--names GLOB] [--markdown FILE]``."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import itertools
import pathlib
import sys
import time
import warnings

import torch

from tests.zoo.law import STRATEGIES, Subject, check
from tests.zoo.subjects import SUBJECTS

__all__ = ["main"]


def result_of(subject: Subject, strategy: str) -> str:
    """Return ``"equal"``, or what went wrong in one line."""
    try:
        problems = check(subject, strategy)
    except Exception as error:  # the table has a row for each model, whatever it raises
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return "equal" if not problems else f"{len(problems)} differences: {problems[0]}"


def version_of(package: str) -> str:
    for distribution in importlib.metadata.packages_distributions().get(package, []):
        return f"{distribution} {importlib.metadata.version(distribution)}"
    return package


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--names", default="*", help="a glob of names")
    parser.add_argument("--markdown", type=pathlib.Path, help="where to write the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, failed = [], 0
    for subject in SUBJECTS:
        if not fnmatch.fnmatch(subject.name, options.names):
            continue
        if not importlib.util.find_spec(subject.package):
            print(f"{subject.name}: {subject.package} is not installed", flush=True)
            continue
        began = time.perf_counter()
        results = {strategy: result_of(subject, strategy) for strategy in STRATEGIES}
        wrong = {strategy: result for strategy, result in results.items() if result != "equal"}
        failed += bool(wrong)
        text = "equal" if not wrong else "; ".join(f"{key}: {value}" for key, value in wrong.items())
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
