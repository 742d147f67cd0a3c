"""``python -m funcshard calibrate``: measure this machine, and write its hardware file."""

from __future__ import annotations

import argparse

from funcshard._utils import table
from funcshard._utils.table import Table
from funcshard.demo.arguments import MOST_PROCESSES, at_least
from funcshard.estimate import Hardware, calibrate


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
        "--gloo", action="store_true", help="communicate through gloo in place of shared memory"
    )


def calibrate_command(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    hardware = calibrate(options.path, ranks=options.ranks, shared_memory=not options.gloo)
    print(_summary(hardware))
    print(
        f"\nEstimate with it: python -m funcshard plan --ranks {options.ranks} --hardware {options.path}"
    )
    return 0


def _summary(hardware: Hardware) -> str:
    table_rows = [
        [f"{name} FLOP/s", f"{flops / 1e9:,.1f} GFLOP/s"] for name, flops in hardware.flops.items()
    ]
    table_rows.append(["memory bandwidth", f"{hardware.memory_bandwidth / 1e9:,.1f} GB/s"])
    # Figures that were not measured are left out.
    measured_shares = {
        "FLOP/s in a training step": hardware.flops_efficiency,
        "bandwidth in a training step": hardware.memory_efficiency,
        "bandwidth in the optimizer": hardware.optimizer_efficiency,
    }
    table_rows += [[name, f"{share:.0%}"] for name, share in measured_shares.items() if share]
    table_rows += [
        [
            f"{link.kind} on {link.size} ranks",
            f"{table.duration(link.latency)} + bytes / {link.bandwidth / 1e9:,.2f} GB/s",
        ]
        for link in hardware.node
    ]
    return str(Table(f"Hardware {hardware.name}", ["figure", "measured"], table_rows))
