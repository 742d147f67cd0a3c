"""``python -m funcshard calibrate``: write a hardware file, for this machine or from your step."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from funcshard._utils import table
from funcshard._utils.options import check_bytes
from funcshard._utils.regular_files import read_regular
from funcshard._utils.table import Table
from funcshard.demo.arguments import MOST_PROCESSES, at_least, positive
from funcshard.estimate import Hardware, Source, calibrate, load_hardware


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "path",
        nargs="?",
        metavar="PATH",
        default="this-machine.json",
        help="file to write (default: this-machine.json)",
    )
    parser.add_argument(
        "--ranks",
        type=at_least(2, MOST_PROCESSES),
        default=2,
        metavar="N",
        help="processes to measure with",
    )
    parser.add_argument(
        "--gloo",
        action="store_true",
        help="communicate through gloo in place of shared memory",
    )
    group = parser.add_argument_group("from a step of your own, in place of measuring CPUs")
    group.add_argument(
        "--from-step", type=positive, metavar="SECONDS",
        help="seconds of a step that you measured: fit the efficiencies of the plan's hardware to it",
    )  # fmt: skip
    group.add_argument(
        "--plan",
        metavar="FILE",
        help="what plan PATH --json printed for the run that you measured; needed with --from-step",
    )
    group.add_argument(
        "--peak", metavar="SIZE",
        help="torch.cuda.max_memory_reserved() of that run, as 61GiB: if it's more than planned, later plans leave as much "
        "memory free",
    )  # fmt: skip


def calibrate_command(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    if options.from_step is not None or options.plan or options.peak:
        hardware = _from_step(options)
        Path(options.path).write_text(hardware.to_json(), encoding="utf-8")
        print(
            f"{hardware.about}\n\nPlan with it: python -m funcshard plan PATH --gpu {options.path}"
        )
        return 0
    hardware = calibrate(options.path, ranks=options.ranks, shared_memory=not options.gloo)
    print(_summary(hardware))
    print(
        f"\nEstimate with it: python -m funcshard plan --ranks {options.ranks} --hardware {options.path}"
    )
    return 0


def _from_step(options: argparse.Namespace) -> Hardware:
    """Return the hardware of a plan, with the efficiencies of a measured step."""
    if options.from_step is None or not options.plan:
        raise ValueError("--from-step and --plan need each other: pass both")
    try:
        planned: Any = json.loads(read_regular(options.plan))
        hardware = load_hardware(planned["gpu"])
        waiting = planned["waiting_seconds"]
        computing = planned["step_seconds"] - waiting
        reserved_bytes = planned["reserved_bytes"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--plan must be a file that plan PATH --json wrote; found {options.plan}, which isn't "
            f"({type(error).__name__}: {error})"
        ) from error
    # Note: the links stay, so what the step took beside waits is computation.
    slower = (options.from_step - waiting) / computing
    efficiencies = {
        name: efficiency / slower
        for name in ("flops_efficiency", "memory_efficiency", "optimizer_efficiency")
        if (efficiency := getattr(hardware, name)) is not None
    }
    if slower <= 0 or max(efficiencies.values()) > 1:
        raise ValueError(
            f"--from-step must be a time that {hardware.name} can reach; found {options.from_step:g} s "
            f"for a plan of {waiting + computing:.3g} s, {waiting:.3g} s of them waiting: pass the "
            "seconds of one step"
        )
    fuller = 1.0
    if options.peak:
        peak = int(options.peak) if options.peak.isdecimal() else options.peak
        fuller = max(1.0, check_bytes("--peak", peak, example="61GiB") / reserved_bytes)
    source = Source(
        f"fitted to a step of {options.from_step:g} s by python -m funcshard calibrate"
    )
    memory_text = (
        f", and leaves {1 - 1 / fuller:.0%} of the memory free" if fuller > 1 else ""
    )
    return dataclasses.replace(
        hardware,
        name=f"{hardware.name}-fitted",
        aliases=(),
        about=f"{hardware.about.removesuffix('.')}; computes {slower:.2f} times as long as {hardware.name}{memory_text}.",
        memory=int(hardware.memory / fuller),
        kernel_overhead=hardware.kernel_overhead * slower,
        sources={
            **hardware.sources,
            **dict.fromkeys([*efficiencies, "kernel_overhead", "memory"], source),
        },
        **efficiencies,
    )


def _summary(hardware: Hardware) -> str:
    table_rows = [
        [f"{name} FLOP/s", f"{flops / 1e9:,.1f} GFLOP/s"]
        for name, flops in hardware.flops.items()
    ]
    table_rows.append(["memory bandwidth", f"{hardware.memory_bandwidth / 1e9:,.1f} GB/s"])
    # Figures that were not measured are left out.
    measured_shares = {
        "FLOP/s in a training step": hardware.flops_efficiency,
        "bandwidth in a training step": hardware.memory_efficiency,
        "bandwidth in the optimizer": hardware.optimizer_efficiency,
    }
    table_rows += [
        [name, f"{share:.0%}"] for name, share in measured_shares.items() if share
    ]
    table_rows += [
        [
            f"{link.kind} on {link.size} ranks",
            f"{table.duration(link.latency)} + bytes / {link.bandwidth / 1e9:,.2f} GB/s",
        ]
        for link in hardware.node
    ]
    return str(Table(f"Hardware {hardware.name}", ["figure", "measured"], table_rows))
