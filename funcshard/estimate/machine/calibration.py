"""``calibrate``: a hardware description of this machine's CPUs."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from funcshard._utils.options import check_count, check_flag, check_path
from funcshard.comm import init_mesh
from funcshard.estimate.machine.hardware import Hardware, Link
from funcshard.estimate.machine.measuring import PASSES, PRODUCTS, ROUNDS, TENSORS, cores, measure
from funcshard.estimate.machine.reference import Reference, StepRates
from funcshard.estimate.machine.sources import Source
from funcshard.estimate.machine.timing import KINDS

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes of the whole buffer
SECONDS = 0.2  # time for each peak


def calibrate(
    path: str | os.PathLike[str] | None = None,
    *,
    ranks: int = 2,
    shared_memory: bool = True,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
    reference: Reference | None = None,
    progress: Callable[[str], None] | None = None,
) -> Hardware:
    """Measure your machine, and return its description.

    It starts ``ranks`` processes, so call it under ``if __name__ == "__main__":``, on an idle
    machine. You wait about half a minute.

    Arguments:
        path: JSON file to write, which ``load_hardware`` reads; ``None`` writes none.
        ranks: number of processes; at least 2.
        shared_memory: whether ranks communicate through shared memory, as in ``fs.init_mesh``, or
            through gloo.
        sizes: bytes of the collectives' whole buffers.
        seconds: seconds for each peak.
        reference: sizes of the transformer whose step gives the efficiencies.
        progress: receives a line before each part; by default standard error does.

    Raises:
        ValueError: fewer than 2 ranks, fewer than 2 sizes, or a path in a missing folder.
        ProcessRaisedException: a rank failed (of ``torch.multiprocessing``).

    Example:
        >>> from funcshard.estimate import calibrate
        >>> def main():  # about half a minute
        ...     return calibrate("this-machine.json", ranks=2)
    """
    ranks = check_count(
        "ranks", ranks, 2, remedy="pass at least 2, since one rank issues no collectives"
    )
    check_flag("shared_memory", shared_memory)
    sizes = sorted({check_count("sizes", size, 4 * ranks, of="bytes") for size in sizes})
    if len(sizes) < 2:
        raise ValueError(
            f"sizes must hold at least 2 sizes, for a latency and a bandwidth; found {sizes}: add "
            "one"
        )
    if path is not None:
        path = check_path("path", path)
    if path is not None and not path.parent.is_dir():
        raise ValueError(
            f"path must lie in a folder that exists; found {os.fspath(path)!r}: create "
            f"{path.parent}"
        )
    report_progress = progress or _say
    way = "shared memory" if shared_memory else "gloo"
    report_progress(
        f"Measuring {ranks} ranks over {way}: about {_expected(len(sizes), seconds):.0f} s on an "
        "idle machine …"
    )
    with tempfile.TemporaryDirectory(prefix="funcshard-calibrate-") as temporary_folder:
        torch.multiprocessing.spawn(
            _rank,
            (ranks, temporary_folder, shared_memory, sizes, seconds, reference or Reference()),
            nprocs=ranks,
        )
        rank_results = [
            torch.load(Path(temporary_folder, f"rank{rank}.pt")) for rank in range(ranks)
        ]
    hardware = _describe(rank_results, ranks, shared_memory)
    if path is not None:
        Path(path).write_text(hardware.to_json(), encoding="utf-8")
        report_progress(f"Wrote {os.fspath(path)}")
    return hardware


def fit_link(kind: str, size: int, times: Mapping[int, float], source: Source) -> Link:
    """Return the link whose latency and bandwidth fit measured seconds by bytes best.

    Arguments:
        times: measured seconds by bytes, for at least two sizes.
    """
    # Why 1 / seconds²: it makes the errors relative, so that small and large buffers count alike.
    weighted_points = [(nbytes, seconds, 1 / seconds**2) for nbytes, seconds in times.items()]

    # Note: the sums of a weighted least-squares line.
    def total(term: Callable[[float, float], float]) -> float:
        return sum(weight * term(nbytes, seconds) for nbytes, seconds, weight in weighted_points)

    total_weight = total(lambda x, y: 1)
    mean_x, mean_y = total(lambda x, y: x) / total_weight, total(lambda x, y: y) / total_weight
    slope = total(lambda x, y: (x - mean_x) * (y - mean_y)) / total(lambda x, y: (x - mean_x) ** 2)
    if slope <= 0:  # noise hides the bandwidth: the largest buffer gives a lower bound
        slope = times[max(times)] / max(times)
    # Note: a latency below zero is noise too.
    latency = mean_y - slope * mean_x
    if latency < 0:  # the best line through zero
        latency, slope = 0.0, total(lambda x, y: x * y) / total(lambda x, y: x * x)
    return Link(size, latency, 1 / slope, source, kind)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _expected(sizes: int, seconds: float) -> float:
    # A collective with its sweep takes 0.01 s, and two steps 0.4 s each.
    run_seconds = PASSES * ROUNDS * (len(KINDS) * sizes * 0.01 + 2 * 0.4)
    return 10 + run_seconds + seconds * (len(PRODUCTS) + 2 + len(TENSORS) + 1)


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    shared_memory: bool,
    sizes: Sequence[int],
    seconds: float,
    reference: Reference,
) -> None:
    """Measure on one rank and save the times in ``folder``."""
    # Note: as in a job on the CPU, each rank has one thread, and all compute at once, because they
    # share the memory.
    torch.set_num_threads(1)
    if sys.platform == "linux" and "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    file_store = dist.FileStore(str(Path(folder, "store")), ranks)
    store_timeout = datetime.timedelta(minutes=5)
    # Note: ranks meet in a file, so no port has to be free.
    dist.init_process_group(
        "gloo", store=file_store, rank=rank, world_size=ranks, timeout=store_timeout
    )
    mesh = init_mesh({"shard": ranks}, device="cpu", shared_memory=shared_memory)
    rank_results = measure(mesh, sizes, seconds, reference)
    dist.destroy_process_group()
    torch.save(rank_results, Path(folder, f"rank{rank}.pt"))


def _describe(measured: Sequence[Mapping[str, Any]], ranks: int, shared_memory: bool) -> Hardware:
    carrier_name, carrier_text, command_option = "gloo", "gloo", " --gloo"
    if shared_memory:
        carrier_name, carrier_text, command_option = "shm", "shared memory", ""
    today = datetime.date.today().isoformat()
    source = Source(
        f"measured by python -m funcshard calibrate{command_option} on {_cpu()}, {today}"
    )

    def mean(figure: str) -> float:
        return statistics.mean(figures[figure] for figures in measured)

    best_times: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for kind, size in measured[0]["collectives"]:
        rank_times = zip(*(figures["collectives"][kind, size] for figures in measured), strict=True)
        # Note: the mean over ranks is one run, and the fastest run counts.
        best_times[kind][size] = min(map(statistics.mean, rank_times))
    links = tuple(fit_link(kind, ranks, best_times[kind], source) for kind in KINDS)
    peak_flops = {
        dtype: statistics.mean(figures["flops"][dtype] for figures in measured)
        for dtype in measured[0]["flops"]
    }
    memory_bandwidth = mean("memory_bandwidth")
    step_rates = StepRates(
        *map(statistics.mean, zip(*(figures["rates"] for figures in measured), strict=True))
    )
    step_source = Source(f"{source.text}, in a training step of a transformer")
    return Hardware(
        name=f"cpu-{ranks}x-{carrier_name}",
        about=f"{_cpu()}; {ranks} ranks with one thread each, {carrier_text}.",
        memory=_memory() // ranks,
        memory_bandwidth=memory_bandwidth,
        flops=peak_flops,
        flops_efficiency=min(1.0, step_rates.flops / peak_flops["float32"]),
        memory_efficiency=min(1.0, step_rates.bandwidth / memory_bandwidth),
        optimizer_efficiency=min(1.0, mean("update") / memory_bandwidth),
        kernel_overhead=mean("kernel_overhead"),
        offload=Link(1, 0.0, mean("copy"), source),
        ranks_per_node=ranks,
        device="cpu",
        node=links,
        network=(),
        sources={
            "memory": Source(f"memory of {_cpu()} shared by {ranks} ranks, {today}"),
            "memory_bandwidth": source,
            "flops_efficiency": step_source,
            "memory_efficiency": step_source,
            "optimizer_efficiency": step_source,
            "kernel_overhead": source,
            "ranks_per_node": Source("the number of ranks that was measured", "exact"),
            **{f"flops.{name}": source for name in peak_flops},
        },
    )


def _cpu() -> str:
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        info_lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        model_names = [
            line.partition(":")[2].strip() for line in info_lines if line.startswith("model name")
        ]
        name = next(iter(model_names), name)
    return f"{name} with {cores()} cores"


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 8 << 30
