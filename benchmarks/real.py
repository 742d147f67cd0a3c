"""Run the programs of ``benchmarks.dry`` on tensors with data, and compare their losses with the CPU's.

``python -m benchmarks.real [--device cuda] [CASE ...]``. Several ranks are simulated ones.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch

import funcshard as fs
from benchmarks.dry.cases import CASES

__all__ = ["main", "run_cases", "row_of"]

# Relative differences of losses that are accepted; by the words in the names of cases.
_LOOSE, _CLOSE = 3e-2, 1e-3
_ROUNDED = ("float16", "bfloat16", "autocast", "muon")  # muon multiplies in bfloat16
_APART = ("dropout", "drawn")  # each device has random numbers of its own


def main() -> int:
    """Run the cases that the command line names; return 0 if all ran and agree."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of cases; all by default")
    parser.add_argument("--device", default="cuda", help="type of the device (default %(default)s)")
    options = parser.parse_args()
    wrong = 0
    for name, found in run_cases(options.device, options.cases or list(CASES)):
        wrong += bool(found)
        print(f"{'BAD ' if found else 'ok  '} {name}{': ' * bool(found)}{found}", flush=True)
    return min(wrong, 1)


def run_cases(device: str, names: list[str], seconds: float = float("inf")) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and its fault in words, or ``""`` if it has none.

    Arguments:
        device: type of the device.
        names: cases of ``benchmarks.dry.cases``.
        seconds: the time after which no further case starts.
    """
    end = time.monotonic() + seconds
    for name in names:
        if time.monotonic() > end:
            yield name, f"not run: the time of {seconds:.0f} s was over"
        else:
            yield name, row_of(device, name)


def row_of(device: str, name: str) -> str:
    """Run one case on a device and on the CPU; return what is wrong, in words."""
    losses = {}
    for kind in (device, "cpu"):
        try:
            losses[kind] = _losses(name, kind)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            first = str(error).partition("\n")[0][:300]
            return f"on {kind}: {type(error).__name__}: {first} ({place.filename}:{place.lineno})"
    if any(word in name for word in _APART):
        return ""
    limit = _LOOSE if any(word in name for word in _ROUNDED) else _CLOSE
    for found, expected in zip(losses[device], losses["cpu"], strict=True):
        if not abs(found - expected) <= limit * abs(expected):  # also if one is NaN
            return f"a loss is {found:.6g}; on the CPU it is {expected:.6g}"
    return ""


def _losses(name: str, device: str) -> list[float]:
    """Return the losses of all ranks, if the case trains."""
    case = CASES[name]

    def main(mesh: fs.Mesh) -> list[float]:
        result: Any = case.run(mesh)
        return [float(loss) for loss in result[0].losses] if isinstance(result, tuple) else []

    exact = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return [loss for losses in fs.simulate(main, dict(case.shape), device=device) for loss in losses]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = exact


if __name__ == "__main__":
    sys.exit(main())
