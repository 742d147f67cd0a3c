"""Estimates of many plans: ``python -m benchmarks.sweep``, in one process and in several."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F

import funcshard as fs
from funcshard.demo import decoder
from funcshard.estimate import Profile

__all__ = ["main"]

UNITS = ["embed", "blocks.*", "norm", "head"]
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "offload")
LIMITS = (1, 2, 3, 4, 5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the sweep of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama3-405b", help="a decoder of funcshard.demo (default %(default)s)")
    parser.add_argument("--meshes", type=int, default=50, help="meshes, each with 20 estimates (default %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="processes of the second sweep (default %(default)s)")
    options = parser.parse_args(arguments)
    profile = _profile(options.model)
    meshes = [8 * number for number in range(1, options.meshes + 1)]
    begin = time.perf_counter()
    count = _sweep(profile, meshes)
    print(f"{count} estimates in one process: {time.perf_counter() - begin:.1f} s")
    begin = time.perf_counter()
    fork = multiprocessing.get_context("fork")  # a forked process shares the profile, which cannot be sent
    parts = [meshes[number :: options.processes] for number in range(options.processes)]
    processes = [fork.Process(target=_sweep, args=(profile, part)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a process of the sweep ended with exit code {process.exitcode}; its error is above")
    print(f"{count} estimates in {options.processes} processes: {time.perf_counter() - begin:.1f} s")


def _profile(model: str) -> Profile:
    with torch.device("meta"):
        apply, params, buffers = fs.make_functional(decoder(model))
        tokens = torch.zeros(1, 4096, dtype=torch.int64)
    precision = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fs.profile(
        apply, params, buffers, tokens, loss=lambda out, y: F.cross_entropy(out.flatten(0, 1).float(), y.flatten()),
        targets=tokens, precision=precision,
    )  # fmt: skip


def _sweep(profile: Profile, meshes: Sequence[int]) -> int:
    """Estimate each strategy with each prefetch limit on each number of ranks; return the count."""
    count = 0
    for ranks in meshes:
        for strategy in STRATEGIES:
            changes = {"offload": True} if strategy == "offload" else {"strategy": strategy}
            plan = fs.make_plan(profile.forms, ranks, units=UNITS, precision=profile.precision, **changes)
            for limit in LIMITS:
                fs.estimate(profile, plan, schedule=fs.make_schedule(plan, limit=limit))
                count += 1
    return count


if __name__ == "__main__":
    main()
