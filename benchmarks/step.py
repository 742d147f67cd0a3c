"""The race: ``python -m benchmarks.step --ranks 2,4 --shapes demo,gpt,wide,deep``.

Every peer trains the same model on the same data. All peers of torch live in the same processes and
take turns, one step each, round after round, so that other work of the machine disturbs all of them
alike. The tables show medians, quartiles and ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import cuda
from benchmarks.jaxed import Jax, has_jax
from benchmarks.peers import COMPILED, PLANS, TITLES, TRACED, planned
from benchmarks.results import MEMORY, check_losses, markdown, memory_table, race_table, ratio, spread
from benchmarks.shapes import SHAPES
from benchmarks.show import progress, show
from benchmarks.turns import Ranks

__all__ = ["main"]

Table = dict[str, Any]  # title, header, rows
WARM = 2  # steps that are not measured: in the first, libraries make state and compilers compile
REST = 0.3  # seconds of rest after the turn of JAX
REPLICATED = ("none", "ddp", "none_compiled", "ddp_compiled")
# Peers that a race leaves out, in this order, if memory is short.
DISPENSABLE = ("fsdp1_kept", "fsdp1", "full_shard_gloo", "shard_grad_op_gloo", "none", "jax")
# The first two show what shared memory gains; the third needs a C++ compiler; the last is DDP's work.
NOT_BY_DEFAULT = (
    "full_shard_gloo", "shard_grad_op_gloo", "full_shard_compiled", "no_shard",
    "none_compiled", "ddp_compiled", "fsdp2_compiled", *TRACED,
)  # fmt: skip
_START, _END = "<!-- results -->", "<!-- end of results -->"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the races of the command line, print the tables, and return everything measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas between (default %(default)s)")
    parser.add_argument("--shapes", default="demo,gpt,wide,deep", help=f"of {', '.join(SHAPES)} (default %(default)s)")
    usual = ",".join(peer for peer in TITLES if peer not in NOT_BY_DEFAULT)
    parser.add_argument(
        "--peers", default=usual, help=f"of {', '.join(TITLES)} (default %(default)s; jax where it is installed)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="turns of every peer (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1, help="steps a turn (default %(default)s)")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory, which takes new processes")
    parser.add_argument("--no-host", action="store_true", help="do not measure host time a unit at world size 1")
    parser.add_argument("--jax-python", default=sys.executable, help="an interpreter that has JAX (default: this one)")
    parser.add_argument("--cuda", action="store_true", help="instead: one GPU, against plain eager and FSDP2")
    parser.add_argument("--trace", type=Path, help="with --cuda: file for a Chrome trace of steps whose gathers are slow")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    parser.add_argument("--markdown", type=Path, help="file for the tables, or a page with markers for them")
    options = parser.parse_args(arguments)
    if options.trace and not options.cuda:
        parser.error("--trace shows what runs on a GPU: it needs --cuda")
    given = sys.argv[1:] if arguments is None else arguments
    found: dict[str, Any] = {"command": command(given), "machine": machine(), "races": [], "tables": []}
    if options.cuda:
        found["tables"] += cuda.tables(file=options.trace)
    else:
        shapes, peers = _listed(options.shapes, SHAPES, "--shapes"), _listed(options.peers, TITLES, "--peers")
        if "jax" in peers and not has_jax(options.jax_python):
            print(f"JAX is not raced: {options.jax_python} has no jax, or no numpy beside it", file=sys.stderr)
            peers.remove("jax")
        for ranks in map(int, options.ranks.split(",")):
            for shape in shapes:
                race = _race(shape, ranks, peers, options)
                found["races"].append(race)
                found["tables"] += race.pop("tables")
        if not options.no_host:
            found["host"] = _host(peers, options.rounds)
            found["tables"].append(_host_table(found["host"]))
    for table in found["tables"]:
        show(table["title"], table["header"], table["rows"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.markdown:
        _put(options.markdown, as_page(found))
    return found


def command(arguments: Iterable[str]) -> str:
    """Return the command to print, with absolute paths shortened to their last part."""
    shown = []
    for argument in arguments:
        option, equals, value = argument.rpartition("=")
        shown.append(option + equals + (Path(value).name if os.path.isabs(value) else value))
    return shlex.join(["python", "-m", "benchmarks.step", *shown])


def machine() -> dict[str, str]:
    """Return the facts about this machine that the numbers depend on."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def as_page(found: dict[str, Any]) -> str:
    """Return the tables as Markdown, after a line about the machine and the command."""
    about = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    parts = [f"Measured on {about}, with\n\n    {found['command']}\n"]
    parts += [f"**{table['title']}**\n\n{markdown(table['header'], table['rows'])}\n" for table in found["tables"]]
    return "\n".join(parts)


def _put(file: Path, page: str) -> None:
    """Write the tables to a file, or between the markers of a page that has them."""
    before, start, rest = file.read_text().partition(_START) if file.exists() else ("", "", "")
    _, end, after = rest.partition(_END)
    file.write_text(f"{before}{start}\n{page}\n{end}{after}" if start and end else page)


def _race(shape: str, ranks: int, peers: list[str], options: Any) -> dict[str, Any]:
    numel = sum(p.numel() for p in SHAPES[shape].module().parameters())
    title = f"{SHAPES[shape].title}; {numel / 1e6:.1f} M parameters, {ranks} ranks"
    peers, left_out = fitting(numel, ranks, distinct(peers, shape, ranks), _free())
    without = f" (no memory for {', '.join(left_out)})" if left_out else ""
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    losses: dict[str, list[float]] = {peer: [] for peer in peers}
    jax = ""
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(Ranks(ranks))
        turns = {}
        for peer in peers:
            if peer == "jax":
                process = stack.enter_context(Jax(SHAPES[shape], ranks, options.jax_python))
                turns[peer], jax = process.steps, f", jax {process.version}"
            else:
                world.call("make", peer, shape)
                turns[peer] = lambda number, peer=peer: world.steps(peer, number)
        for i in progress(range(-1, options.rounds), title + without):
            for peer in peers:
                took, found = turns[peer](WARM if i < 0 else options.steps)
                time.sleep(REST if peer == "jax" else 0)  # its threads stay busy for a while after a step
                losses[peer] += found
                if i >= 0:
                    seconds[peer].append(took / options.steps)
    check_losses(losses)
    peaks = {} if options.no_memory else _peaks([peer for peer in peers if peer != "jax"], shape, ranks)
    traffic = {}
    for strategy in (peer for peer in PLANS if peer in peers):
        with Ranks(ranks) as world:
            traffic[strategy] = world.call("traffic", strategy, shape)[0]
    tables = [_table(f"{title}{without}; {options.rounds} rounds{jax}", *race_table(seconds))]
    if peaks:
        tables.append(_table(f"Peak memory a process, the higher of the ranks'; {title}", *memory_table(peaks)))
    if traffic:
        tables.append(_traffic_table(traffic, title))
    return {
        "shape": shape, "ranks": ranks, "numel": numel, "seconds": seconds, "losses": losses, "peaks": peaks,
        "traffic": {k: [row._asdict() for row in v] for k, v in traffic.items()}, "tables": tables,
    }  # fmt: skip


def _peaks(peers: list[str], shape: str, ranks: int) -> dict[str, dict[str, int]]:
    """Return the peak memory of every peer, or nothing if the system does not report it."""
    peaks: dict[str, dict[str, int]] = {}
    for peer in progress(peers, "memory"):
        for kind in MEMORY:
            with Ranks(ranks) as world:
                found = world.call("peak", peer, shape, kind == "in_use")
            if None in found:
                return {}
            peaks.setdefault(peer, {})[kind] = max(found)
    return peaks


def _table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    return {"title": title, "header": header, "rows": rows}


def _traffic_table(traffic: dict[str, Any], title: str) -> Table:
    header = ["strategy", "units", "collectives of units", "MiB sent a rank and step", "bound"]
    rows = []
    for strategy, units in traffic.items():
        sent, bound = (sum(getattr(row, key) for row in units) / 2**20 for key in ("sent", "bound"))
        calls = sum(row.calls for row in units)
        rows.append([strategy, str(len(units)), str(calls), f"{sent:.2f}", f"{bound:.2f}"])
    return _table(f"Traffic; {title}", header, rows)


def _host(peers: list[str], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with Ranks(1) as world:
        (names,) = world.call("make_host", peers)
        for i in progress(range(-1, rounds), "host time a unit"):
            for name in names:
                (took,) = world.call("host", name, 3)
                if i >= 0:
                    found.setdefault(name, []).append(took)
    return found


def _host_table(host: dict[str, list[float]]) -> Table:
    header = ["peer", "µs a unit and step (quartiles)", *(["÷ FSDP2"] if "fsdp2" in host else [])]
    rows = []
    for peer, own in host.items():
        row = [TITLES[peer], spread(own).text(1, 1e6)]
        if "fsdp2" in host:
            row.append("" if peer == "fsdp2" else ratio(own, host["fsdp2"]).text(2))
        rows.append(row)
    return _table("Host time; 100 units of one linear layer 4 × 4, 1 rank, no optimizer", header, rows)


def distinct(peers: Iterable[str], shape: str, ranks: int) -> list[str]:
    """Return the peers without those that run the same plan, compiled alike, as an earlier one."""
    plans = {peer: (planned(SHAPES[shape], peer, ranks), peer in COMPILED) for peer in peers if peer in PLANS}
    first = {plan: peer for peer, plan in reversed(plans.items())}
    return [peer for peer in peers if peer not in plans or first[plans[peer]] == peer]


def fitting(numel: int, ranks: int, peers: Sequence[str], free: float) -> tuple[list[str], list[str]]:
    """Return the peers that can race together in ``free`` bytes, and those left out.

    Raises:
        SystemExit: the memory is too small for any race, which would measure the swap disk.
    """
    staying, left_out = list(peers), []
    dispensable = [peer for peer in DISPENSABLE if peer in peers]
    while (needed := _needed(numel, ranks, staying)) > free:
        if not dispensable or len(staying) == 1:
            raise SystemExit(
                f"{numel / 1e6:.1f} M parameters on {ranks} ranks: {', '.join(TITLES[peer] for peer in staying)} need about "
                f"{needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; race fewer peers at a time (--peers)"
            )
        left_out.append(dispensable.pop(0))
        staying.remove(left_out[-1])
    return staying, left_out


def _needed(numel: int, ranks: int, peers: Iterable[str]) -> float:
    """Return the bytes, over all ranks, of the states of all peers and a step of one of them."""
    whole = 4 * numel * ranks  # all parameters in float32 on every rank
    # Python and torch; a step's gathered parameters, its gradients, and copies of some of them.
    needed = 0.4 * 2**30 * ranks + 2.5 * whole
    for peer in peers:
        needed += 3 * whole / (1 if peer in REPLICATED else ranks)  # parameters and AdamW's two moments
        # Memory kept between steps: DDP's gradients, shard_grad_op's gathered parameters, XLA's for
        # both.
        needed += whole * {"jax": 2}.get(peer, int(peer.startswith(("ddp", "no_shard", "shard_grad_op"))))
    return 1.1 * needed


def _free() -> float:
    """Return the bytes of free memory."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return math.inf


def _listed(text: str, known: Any, option: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise SystemExit(f"{option}: found {name!r}; known are {', '.join(known)}")
    return names


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


if __name__ == "__main__":
    main()
