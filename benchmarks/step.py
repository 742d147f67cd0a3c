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
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import funcshard as fs
from benchmarks import results
from benchmarks.jaxed import Jax, has_jax
from benchmarks.peers import COMPILED, EXACT, PLANS, TITLES, TRACED, Ranks, planned
from benchmarks.results import Table, progress, ratio, spread
from benchmarks.shapes import SHAPES

WARM = 2  # steps that are not measured: in the first, libraries make state and compilers compile
REST = 0.3  # seconds of rest after the turn of JAX
REPLICATED = ("none", "ddp", "none_compiled", "ddp_compiled")
# Peers that a race leaves out, in this order, if memory is short.
DISPENSABLE = ("fsdp1_kept", "fsdp1", "full_shard_gloo", "shard_grad_op_gloo", "none", "jax")
# The first two show what shared memory gains; the third needs a C++ compiler.
NOT_BY_DEFAULT = (
    "full_shard_gloo", "shard_grad_op_gloo", "full_shard_compiled", "full_shard_exact", "no_shard",
    "none_compiled", "ddp_compiled", "fsdp2_compiled", *TRACED,
)  # fmt: skip
FIRST, LATER = 1e-5, 1e-3  # accepted relative difference of losses: before the first update, and after it
REFERENCES = ("ddp", "fsdp2", "fsdp2_kept", "jax")


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
    parser.add_argument("--jax-python", default=sys.executable, help="an interpreter that has JAX (default: this one)")
    parser.add_argument("--hardware", help="a file that calibrate wrote: adds the estimates of funcshard's times")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    parser.add_argument("--markdown", type=Path, help="a page with markers for the tables")
    options = parser.parse_args(arguments)
    shapes, peers = listed(options.shapes, SHAPES, "--shapes"), listed(options.peers, TITLES, "--peers")
    if "jax" in peers and not has_jax(options.jax_python):
        print(f"JAX is not raced: {options.jax_python} has no jax, or no numpy beside it", file=sys.stderr)
        peers.remove("jax")
    command = shlex.join(["python", "-m", "benchmarks.step", *(sys.argv[1:] if arguments is None else arguments)])
    races = [_race(shape, int(ranks), peers, options) for ranks in options.ranks.split(",") for shape in shapes]
    if options.markdown:
        pages = [Table(*race["table"]).page() for race in races]
        text = "\n".join([f"Measured on {results.about()}, with\n\n    {command}\n", *pages])
        results.put(options.markdown, "<!-- results -->", "<!-- end of results -->", text)
    measured = {"command": command, "machine": results.machine(), "races": races}
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1))
    return measured


def listed(text: str, known: Iterable[str], option: str) -> list[str]:
    """Return the names of an option of the command line, which have to be known ones."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise SystemExit(f"{option}: found {name!r}; known are {', '.join(known)}")
    return names


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
        for peer in peers:
            if peer == "jax":
                process = stack.enter_context(Jax(SHAPES[shape], ranks, options.jax_python))
                jax = f", jax {process.version}"
            else:
                world.call("make", peer, shape)
        for i in progress(range(-1, options.rounds), title + without):
            for peer in peers:
                number = WARM if i < 0 else options.steps
                if peer == "jax":
                    took, found = process.steps(number)
                    time.sleep(REST)  # its threads stay busy for a while after a step
                else:
                    took, found = world.steps(peer, number)
                losses[peer] += found
                if i >= 0:
                    seconds[peer].append(took / number)
    check_losses(losses)
    header, rows = race_table(seconds)
    if options.hardware:
        header.append("estimated ms")
        for row, peer in zip(rows, peers, strict=True):
            row.append(estimated(shape, peer, ranks, options.hardware, spread(seconds[peer]).median))
    table = Table(f"{title}{without}; {options.rounds} rounds{jax}", header, rows)
    table.show()
    return {
        "shape": shape, "ranks": ranks, "numel": numel, "seconds": seconds, "losses": losses,
        "table": list(table),
    }  # fmt: skip


def estimated(shape: str, peer: str, ranks: int, hardware: str, measured: float) -> str:
    """Return the estimated time of a step of one of funcshard's peers, with its error; of another, nothing."""
    if peer not in PLANS or peer in (*COMPILED, EXACT):
        return ""
    with torch.device("meta"):
        apply, params, buffers = fs.make_functional(SHAPES[shape].build())
    inputs, targets = SHAPES[shape].batches(0)[0]
    profile = fs.profile(apply, params, buffers, inputs, loss=SHAPES[shape].loss, targets=targets)
    plan = planned(SHAPES[shape], peer, ranks)
    step_time = fs.estimate(profile, plan, hardware=hardware, optimizer="adamw_fused").step_time
    return f"{1e3 * step_time:.1f} ({step_time / measured - 1:+.0%})"


def distinct(peers: Iterable[str], shape: str, ranks: int) -> list[str]:
    """Return the peers without those that run the same plan, compiled alike, as an earlier one."""
    plans = {peer: (planned(SHAPES[shape], peer, ranks), peer in COMPILED) for peer in peers if peer in PLANS}
    first = {plan: peer for peer, plan in reversed(plans.items())}
    return [peer for peer in peers if peer not in plans or first[plans[peer]] == peer]


def fitting(numel: int, ranks: int, peers: Sequence[str], free: float) -> tuple[list[str], list[str]]:
    """Return the peers that can race together in ``free`` bytes, and those left out."""
    staying, left_out = list(peers), []
    dispensable = [peer for peer in DISPENSABLE if peer in peers]
    while (needed := _needed(numel, ranks, staying)) > free:
        if not dispensable or len(staying) == 1:
            who = f"{', '.join(TITLES[peer] for peer in staying)} on {ranks} ranks need about {needed / 2**30:.1f} GiB"
            raise SystemExit(f"{who}, {free / 2**30:.1f} GiB are free; race fewer peers at a time (--peers)")
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
        # Kept between steps: DDP's gradients, shard_grad_op's gathered parameters, XLA's for both.
        needed += whole * {"jax": 2}.get(peer, int(peer.startswith(("ddp", "no_shard", "shard_grad_op"))))
    return 1.1 * needed


def _free() -> float:
    """Return the bytes of free memory."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return math.inf


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Raise ``ValueError`` unless the losses of all peers are the same up to rounding.

    Of the peer without communication only the first loss is compared, because its ranks train alone
    after that.
    """
    reference = next((peer for peer in losses if not peer.startswith("none")), "none")
    expected = losses[reference]
    for peer, found in losses.items():
        if len(found) != len(expected):
            raise ValueError(f"{TITLES[peer]} took {len(found)} steps, {TITLES[reference]} {len(expected)}")
        for i, (a, b) in enumerate(zip(found[: 1 if peer.startswith("none") else None], expected, strict=False)):
            if not abs(a - b) <= (LATER if i else FIRST) * abs(b):
                raise ValueError(
                    f"{TITLES[peer]} computes something else than {TITLES[reference]}: in step {i} its loss is {a!r}, not "
                    f"{b!r}; times of different computations cannot be compared"
                )


def race_table(seconds: Mapping[str, Sequence[float]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of one race, from seconds of a step in each round by peer."""
    against = [peer for peer in REFERENCES if peer in seconds]
    header = ["peer", "ms a step (quartiles)", *(f"÷ {TITLES[peer]}" for peer in against)]
    rows = []
    for peer, own in seconds.items():
        row = [TITLES[peer], spread(own).text(1, 1000)]
        row += ["" if other == peer else ratio(own, seconds[other]).text(2) for other in against]
        rows.append(row)
    return header, rows


if __name__ == "__main__":
    main()
