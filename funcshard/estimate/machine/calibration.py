"""``calibrate``: a hardware description of this machine's CPUs."""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from funcshard._utils.options import check_count, check_flag, check_path
from funcshard.comm import init_mesh
from funcshard.estimate.machine.hardware import Hardware, Link, Source
from funcshard.estimate.machine.measuring import Reference, StepRates, cores, measure
from funcshard.estimate.machine.timing import KINDS

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes of the whole buffer


def calibrate(
    path: str | os.PathLike[str] | None = None,
    *,
    ranks: int = 2,
    shared_memory: bool = True,
    sizes: Sequence[int] = SIZES,
    reference: Reference | None = None,
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
        reference: sizes of the transformer whose step gives the efficiencies.

    Raises:
        ValueError: fewer than 2 ranks, or a path in a missing folder.
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
    if path is not None:
        path = check_path("path", path)
        if not path.parent.is_dir():
            raise ValueError(
                f"path must lie in a folder that exists; found {str(path)!r}: create {path.parent}"
            )
    way = "shared memory" if shared_memory else "gloo"
    print(f"Measuring {ranks} ranks over {way} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="funcshard-calibrate-") as temporary_folder:
        torch.multiprocessing.spawn(
            _rank,
            (ranks, temporary_folder, shared_memory, sizes, reference or Reference()),
            nprocs=ranks,
        )
        rank_results = [
            torch.load(Path(temporary_folder, f"rank{rank}.pt")) for rank in range(ranks)
        ]
    hardware = _describe(rank_results, ranks, shared_memory)
    if path is not None:
        path.write_text(hardware.to_json(), encoding="utf-8")
        print(f"Wrote {path}", file=sys.stderr, flush=True)
    return hardware


def fit_link(kind: str, size: int, times: Mapping[int, float], source: Source) -> Link:
    """Return the link whose latency and bandwidth fit measured seconds by bytes best.

    Arguments:
        times: measured seconds by bytes, for at least two sizes.
    """
    sizes, seconds = torch.tensor(list(times.items()), dtype=torch.float64, device="cpu").T
    # Why divided by the seconds: errors are relative then, so small and large buffers count alike.
    rows = torch.stack([sizes / seconds, 1 / seconds], dim=1)
    slope, latency = torch.linalg.lstsq(rows, torch.ones_like(rows[:, :1])).solution[:, 0].tolist()
    # Note: noise may hide the bandwidth, and then the largest buffer gives a lower bound of it.
    if slope <= 0:
        slope, latency = times[max(times)] / max(times), 0.0
    # Note: a latency below zero is noise too; this is the best line through zero.
    if latency < 0:
        slope, latency = float(rows[:, 0].sum() / rows[:, 0].square().sum()), 0.0
    return Link(size, latency, 1 / slope, source, kind)


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    shared_memory: bool,
    sizes: Sequence[int],
    reference: Reference,
) -> None:
    """Measure on one rank and save the times in ``folder``."""
    # Note: as in a job on the CPU, each rank has one thread, and all compute at once, because they
    # share the memory.
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    file_store = dist.FileStore(str(Path(folder, "store")), ranks)
    # Note: ranks meet in a file, so no port has to be free.
    dist.init_process_group(
        "gloo", store=file_store, rank=rank, world_size=ranks, timeout=datetime.timedelta(minutes=5)
    )
    mesh = init_mesh({"shard": ranks}, device="cpu", shared_memory=shared_memory)
    torch.save(measure(mesh, sizes, reference), Path(folder, f"rank{rank}.pt"))
    dist.destroy_process_group()


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
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks,
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
    info_text = Path("/proc/cpuinfo").read_text(errors="replace")
    model_line = re.search(r"model name\s*: (.+)", info_text)
    name = model_line[1] if model_line else platform.machine()
    return f"{name} with {cores()} cores"
