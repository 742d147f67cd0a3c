"""The battery for the day when a GPU is there: ``python -m benchmarks.gpu --out DIR [--dry]``.

Each part runs in a process of its own, for at most its time; all together take at most 8 minutes on
an H100, and about 5 are expected. A part that fails does not stop the others. A second call with the
same folder skips the parts that have a result, also after the first call was killed. ``--list``
prints the parts with their seconds. ``--dry`` runs the parts that need no GPU, on fake CUDA tensors
and on the CPU; there a part has ten times its seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.dry.device import missing
from benchmarks.gpu_parts import PARTS
from benchmarks.rank_processes import FailedError, RankProcesses
from benchmarks.results import Table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts of the command line; return 0 if all goals are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for results; those that it holds are kept")
    parser.add_argument("--dry", action="store_true", help="run what can run without a GPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas between (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the parts, with expected and longest seconds")
    options = parser.parse_args(arguments)
    names = options.parts.split(",")
    if options.list:
        print("\n".join(f"{name:14} {part.expected:4} s {part.seconds:4} s  {part.title}" for name, part in PARTS.items()))
        return 0
    if options.out is None:
        parser.error("the following arguments are required: --out")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if not options.dry and not torch.cuda.is_available():
        print("there is no CUDA device here: pass --dry for the parts that need none", file=sys.stderr)
        return 2
    if options.dry and missing():
        print(missing(), file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in names:
        file = options.out / f"{name}.json"
        if PARTS[name].dry or not options.dry:
            done = json.loads(file.read_text()) if file.exists() else {}
            kept = done.get("dry") == options.dry and "error" not in done
            results[name] = done if kept else _run(name, options.out, options.dry)
            print(f"{name}: {_verdict(results[name])}, {results[name]['seconds']:.0f} s", flush=True)
            # Why after each part: the session may end at any time.
            (options.out / "gpu.md").write_text(page(results, dry=options.dry))
    return 0 if all(result.get("ok") for result in results.values()) else 1


def page(results: Mapping[str, Mapping[str, Any]], *, dry: bool) -> str:
    """Return the Markdown page of results, by name of the part."""
    device = "no GPU (a dry run)" if dry else torch.cuda.get_device_name()
    lines = ["# GPU battery", "", f"{device}, torch {torch.__version__}", ""]
    for name, part in PARTS.items():
        lines += [f"## {part.title}", ""]
        if name not in results:
            lines += ["Not run: it needs a GPU." if dry and not part.dry else "Not run.", ""]
            continue
        result = results[name]
        lines += [f"{_verdict(result)}, {result['seconds']:.0f} s.", ""]
        lines += [Table(*table).page() for table in result.get("tables", [])]
        if "error" in result:
            lines += ["```", result["error"].strip()[-1500:], "```", ""]
    return "\n".join(lines)


def _verdict(result: Mapping[str, Any]) -> str:
    return "failed" if "error" in result else "goals met" if result.get("ok") else "a goal is missed"


def _run(name: str, out: Path, dry: bool) -> dict[str, Any]:
    """Run a part in a process of its own, write its result to a file, and return it."""
    begin, seconds = time.monotonic(), PARTS[name].seconds * (10 if dry else 1)
    try:
        # Why a server: importing torch takes seconds, and it does so once for all parts.
        with RankProcesses(1, _Part, preload=["benchmarks.gpu_parts"], timeout=seconds, connect=False) as process:
            ((tables, ok),) = process.call("run", name, out, dry)
        found: dict[str, Any] = {"tables": tables, "ok": ok}
    except FailedError as error:
        found = {"error": str(error)}
    result = {**found, "dry": dry, "seconds": time.monotonic() - begin}
    part = out / f"{name}.part"
    part.write_text(json.dumps(result, indent=1))
    part.replace(out / f"{name}.json")  # in one step: a half result would count as one
    return result


class _Part:
    def __init__(self, *_: int) -> None:
        """Take the rank and the number of ranks, which a part does not need."""

    def run(self, name: str, out: Path, dry: bool) -> tuple[list[Table], bool]:
        return PARTS[name].run(out, dry)


if __name__ == "__main__":
    sys.exit(main())
