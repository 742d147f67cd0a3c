"""Estimated against measured step times on this machine: ``python -m benchmarks.step_estimate``.

The command calibrates, then races the strategies as ``benchmarks.step`` does, and prints the estimate
of each step beside the measurement. Other programs make steps longer, so the processor time of a
step stands beside it too: it leaves out the time that other programs take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import funcshard as fs
from benchmarks.peers import PLANS, TITLES, planned
from benchmarks.results import spread
from benchmarks.shapes import SHAPES
from benchmarks.show import progress, show
from benchmarks.turns import Ranks
from funcshard.estimate import Hardware, calibrate, load_hardware

__all__ = ["estimated", "main", "misordered"]

BOUND = 0.15  # accepted relative error of a step's time
WARM = 2  # steps that are not measured


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Calibrate, race and compare as the command line says; return everything measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_estimate", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default %(default)s)")
    parser.add_argument("--shapes", default="demo,gpt", help=f"of {', '.join(SHAPES)} (default %(default)s)")
    parser.add_argument("--peers", default="full_shard,shard_grad_op,no_shard", help="plans (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every plan (default %(default)s)")
    parser.add_argument("--hardware", help="a name, or a file that calibrate wrote; by default it is measured first")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    options = parser.parse_args(arguments)
    peers, shapes = options.peers.split(","), options.shapes.split(",")
    for option, names, known in (("--peers", peers, [*PLANS]), ("--shapes", shapes, [*SHAPES])):
        if unknown := sorted(set(names) - set(known)):
            parser.error(f"{option}: found {unknown[0]!r}; known are {', '.join(known)}")
    found: dict[str, Any] = {"races": []}
    for shape in shapes:
        # Why again for each model: the speed of a virtual machine changes from minute to minute.
        hardware = load_hardware(options.hardware) if options.hardware else _calibrated(options.ranks)
        estimates = {peer: estimated(shape, peer, options.ranks, hardware) for peer in peers}
        times = _race(shape, peers, options.ranks, options.rounds)
        _compare(SHAPES[shape].title, estimates, times)
        found["races"].append({"shape": shape, "estimated": estimates, **times, "hardware": json.loads(hardware.to_json())})
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return found


def estimated(shape: str, peer: str, ranks: int, hardware: Hardware) -> dict[str, float]:
    """Return the estimated seconds of a step, and those in which the rank waits for collectives."""
    with torch.device("meta"):
        module = SHAPES[shape].build()
    apply, params, buffers = fs.make_functional(module)
    inputs, targets = SHAPES[shape].batches(0)[0]
    profile = fs.profile(apply, params, buffers, inputs, loss=SHAPES[shape].loss, targets=targets)
    report = fs.estimate(profile, planned(SHAPES[shape], peer, ranks), hardware=hardware, optimizer="adamw_fused")
    return {"step": report.step_time, "exposed": report.exposed}


def misordered(estimates: Mapping[str, float], times: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, str]]:
    """Yield pairs of peers of which the first is slower by the estimate, and faster when measured.

    Peers whose measured quartiles overlap are tied, so no order of them is wrong.
    """
    for one, other in itertools.permutations(times, 2):
        if estimates[one] > estimates[other] and spread(times[one]).high < spread(times[other]).low:
            yield one, other


def _calibrated(ranks: int) -> Hardware:
    with tempfile.TemporaryDirectory() as folder:
        return calibrate(Path(folder, "here.json"), ranks=ranks)


def _race(shape: str, peers: Sequence[str], ranks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds, and the seconds of processor time, of each step of each peer."""
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    processor: dict[str, list[float]] = {peer: [] for peer in peers}
    with Ranks(ranks) as world:
        for peer in peers:
            world.call("make", peer, shape)
            world.steps(peer, WARM)
        for _ in progress(range(rounds), SHAPES[shape].title):
            for peer in peers:
                before = world.call("processor_time")
                seconds[peer].append(world.steps(peer, 1)[0])
                after = world.call("processor_time")
                processor[peer].append(max(end - begin for begin, end in zip(before, after, strict=True)))
    return {"seconds": seconds, "processor": processor}


def _compare(title: str, estimates: Mapping[str, Mapping[str, float]], times: Mapping[str, Any]) -> None:
    """Print the table of one model."""
    rows: list[list[str]] = []
    errors: dict[str, list[float]] = {"seconds": [], "processor": []}
    for peer, each in estimates.items():
        row = [TITLES[peer], f"{1e3 * each['step']:.0f}", f"{1e3 * each['exposed']:.0f}"]
        for kind in ("seconds", "processor"):
            taken = spread(times[kind][peer])
            error = each["step"] / taken.median - 1
            row += [taken.text(0, 1e3), f"{error:+.1%}"]
            errors[kind].append(abs(error))
        rows.append(row)
    header = ["plan", "estimated ms", "of it collectives", "measured ms (quartiles)", "error", "processor ms", "error"]
    show(title, header, rows)
    wrong = list(misordered({peer: each["step"] for peer, each in estimates.items()}, times["seconds"]))
    order = "right" if not wrong else f"wrong: {'; '.join(f'{one} is faster than {other}' for one, other in wrong)}"
    wall, processor = max(errors["seconds"]), max(errors["processor"])
    verdict = "within" if wall <= BOUND else "ABOVE"
    print(f"Largest error {wall:.1%}, {verdict} {BOUND:.0%}; of processor time {processor:.1%}.")
    print(f"The order of the plans is {order}.")
    print(f"Load of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")


if __name__ == "__main__":
    main()
