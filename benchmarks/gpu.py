"""The battery for the day when a GPU is there: ``python -m benchmarks.gpu --out DIR [--dry]``.

Each part runs in a process of its own, for at most its time; all together take at most 8 minutes on
an H100, and about 5 are expected. A part that fails does not stop the others. A second call with the
same folder skips the parts that have a result, also after the first call was killed. ``--list``
prints the parts with their seconds. ``--dry`` runs the parts that need no GPU: on fake CUDA tensors,
and on gloo in place of NCCL; there a part has ten times its seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.dry.device import missing
from benchmarks.gpu_parts import PARTS
from benchmarks.results import markdown

__all__ = ["main", "page"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts of the command line; return 0 if all goals are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
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
    return 0 if all(each.get("ok") for each in results.values()) else 1


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
        for table in result.get("tables", []):
            lines += [f"**{table['title']}**", "", markdown(table["header"], table["rows"]), ""]
        if "error" in result:
            lines += ["```", result["error"].strip()[-1500:], "```", ""]
    return "\n".join(lines)


def _verdict(result: Mapping[str, Any]) -> str:
    return "failed" if "error" in result else "goals met" if result.get("ok") else "a goal is missed"


def _run(name: str, out: Path, dry: bool) -> dict[str, Any]:
    """Run a part in a process of its own, and stop it, with its children, when its time is over."""
    file, begin = out / f"{name}.json", time.monotonic()
    file.unlink(missing_ok=True)
    # Why a server: importing torch takes seconds, and it does so once for all parts.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu_parts"])
    process = context.Process(target=_work, args=(name, out, dry))
    process.start()
    try:
        process.join(_seconds(name, dry))
        error = f"the process ended with status {process.exitcode} and without a result"
        if process.is_alive():
            error = f"stopped after its time of {_seconds(name, dry)} s"
    finally:
        if process.is_alive():
            process.kill()  # it may lead no group yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
    if not file.exists():
        _write(file, {"error": error, "dry": dry, "seconds": time.monotonic() - begin})
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _work(name: str, out: Path, dry: bool) -> None:
    _lead_group()
    _write(out / f"{name}.json", _result(name, out, dry))


def _lead_group() -> None:
    """Make this process lead a group, which can be killed; on Linux it ends with its parent."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _seconds(name: str, dry: bool) -> int:
    return PARTS[name].seconds * (10 if dry else 1)


def _result(name: str, out: Path, dry: bool) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        found = PARTS[name].run(out, dry)
    except Exception:
        found = {"error": traceback.format_exc()}
    return {**found, "dry": dry, "seconds": time.monotonic() - begin}


def _write(file: Path, result: Mapping[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1))
    part.replace(file)  # in one step: a half result would count as one


if __name__ == "__main__":
    sys.exit(main())
