"""Measure the memory of real ranks over gloo, as the allocator of PyTorch reports it.

``python -m benchmarks.memory_gloo --ranks 2`` starts the ranks, which run some of the cases of
``memory_truth``. PyTorch's profiler lists each allocation and each release of the CPU's allocator in
a few steps after the first; the median of their peaks counts. Memory from before a step is that of
the state and the batch. The table shows each rank next to a rank of the same job that runs alone,
among ranks that do not exist.

The ranks communicate over gloo alone, because shared memory is no memory of the allocator.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import multiprocessing
import os
import queue
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import funcshard as fs
from benchmarks.fake_ranks import fake_mesh
from benchmarks.memory_truth import CASES, make_step, measure, prepare
from benchmarks.show import show
from benchmarks.storages import Storages

__all__ = ["USUAL", "main", "measure_ranks"]

USUAL = (
    "gpt full_shard", "gpt full_shard bf16", "gpt shard_grad_op", "gpt no_shard", "gpt no_shard bf16",
    "gpt full_shard remat", "gpt full_shard checkpoint", "llama full_shard", "llama full_shard bf16 remat",
    "moe full_shard", "moe no_shard bf16",
)  # fmt: skip
STEPS = 8  # that are profiled


class _Allocated:
    """In place of a group's pool, so that all of its memory is the allocator's."""

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)


def measure_ranks(names: Sequence[str], shape: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the peak of a step of some cases after their first one, in bytes by case, of each rank.

    Arguments:
        names: names of cases.
        shape: the size of each axis of the mesh, in place of that of the cases.
    """
    ranks = 1
    for size in shape.values():
        ranks *= size
    context = multiprocessing.get_context("forkserver")  # ranks are forked from a process that has imported torch
    context.set_forkserver_preload(["benchmarks.memory_gloo", "torch._dynamo"])
    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="memory-") as directory:
        answers = context.Queue()
        arguments = (ranks, directory, list(names), dict(shape), answers)
        processes = [context.Process(target=_work, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
        try:
            for process in processes:
                process.start()
            for _ in processes:
                rank, answer = _next(answers, processes)
                if isinstance(answer, str):
                    raise RuntimeError(f"rank {rank} failed: {answer}")
                found[rank] = answer
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [found[rank] for rank in range(ranks)]


def _next(answers: Any, processes: Sequence[Any]) -> tuple[int, Any]:
    """Return the next answer; it may take as long as its process lives, however busy the machine is."""
    while True:
        ended = [process.exitcode for process in processes if not process.is_alive()]
        try:
            return answers.get(timeout=1)
        except queue.Empty:
            if any(ended):
                raise RuntimeError(f"a rank ended without an answer; exit codes: {ended}") from None


def _work(rank: int, ranks: int, directory: str, names: list[str], shape: dict[str, int], answers: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # Why: oneDNN takes scratch memory from the same allocator, and how much depends on the processor.
    # At the peak of a bfloat16 step it was 0 % with AVX2, and 2.6 % and 3.8 % with two kinds of AVX-512.
    torch.backends.mkldnn.set_flags(False)
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
        mesh = fs.init_mesh(shape, device="cpu", shared_memory=False)
        groups: dict[str, Any] = dict(mesh.groups)
        for axis, group in groups.items():
            if group.size > 1:
                groups[axis] = dataclasses.replace(group, pool=_Allocated())
        answers.put((rank, {name: _measure_rank(name, fs.Mesh(groups, mesh.device)) for name in names}))
        mesh.shard.all_gather_text("done")  # so that no rank ends while another one measures
    except Exception as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
        raise


def _measure_rank(name: str, mesh: fs.Mesh) -> int:
    setup = prepare(CASES[name], mesh)
    step, state = make_step(setup)
    batch = setup.batch
    del setup
    state, _ = step(state, batch)
    held = Storages()
    held.hold("state", (state.shards, state.buffers, state.opt_state, batch))
    before = held.live["cpu"]
    del held
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(STEPS):
            with torch.profiler.record_function("step"):
                state, _ = step(state, batch)
    peaks: list[int] = []
    live = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "step":
            live = before
            peaks.append(live)
        elif event.name() == "[memory]" and peaks:
            live += event.nbytes()
            peaks[-1] = max(peaks[-1], live)
    assert len(peaks) == STEPS
    # Why the median: gloo's threads hold tensors a little longer, and on a busy machine now and then
    # into the next allocation or the next step. Peaks of 7 % more and 10 % less were measured.
    return statistics.median_low(peaks)


def main(arguments: Sequence[str] | None = None) -> list[list[str]]:
    """Measure real ranks, print them next to ranks alone, and return the cells of the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_gloo", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default %(default)s)")
    parser.add_argument("--cases", default=",".join(USUAL), help="names of cases, with commas between")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names, shape = chosen.cases.split(","), {"shard": chosen.ranks}
    cells = []
    for rank, peaks in enumerate(measure_ranks(names, shape)):
        for name, real in peaks.items():
            alone = measure(CASES[name], fake_mesh(shape, rank=rank, gloo=True)).peak
            cells.append([name, str(rank), f"{real:,}", f"{alone:,}", f"{100 * (alone / real - 1):+.2f} %"])
    show(
        f"bytes at the peak, {chosen.ranks} ranks over gloo", ["case", "rank", "allocated", "tracked alone", "error"], cells
    )
    return cells


if __name__ == "__main__":
    main()
