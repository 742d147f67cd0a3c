"""``calibrate``: a hardware description of this machine's CPUs.

All ranks measure at once. Peaks are those of the fastest run. Efficiencies come from the reference
step, a training step of a small transformer that is timed kernel by kernel: kernels read cold
operands, several functions take more time than a sum, and all ranks compute at once. A collective
is measured after a sweep through memory that empties the caches.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn

from funcshard._utils.options import check_count, check_flag, check_path
from funcshard._utils.torch_operators import (
    count_flops,
    moved_bytes,
    new_tensors,
    writes_inputs,
)
from funcshard._utils.torch_private import TorchDispatchMode
from funcshard.comm import Group, Mesh, Op, init_mesh
from funcshard.estimate.machine.hardware import Hardware, Link, Source
from funcshard.estimate.machine.timing import KINDS
from funcshard.plan import dtype_name

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes of the whole buffer
PRODUCT = (512, 384, 1536)  # m, k and n of a product in float32
SMALL = (128, 384, 384)  # for other dtypes, which many CPUs multiply a hundred times slower
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
KERNELS = 50  # small products in a row; forward and backward have a kernel for each
LEAVES = 8  # gradients that a reduction joins
TENSOR = 1 << 24  # bytes of the tensors of an addition
ROUNDS = 15  # over all figures, so that a burst of other work spoils only one

# Processor time, so that other programs do not count; on Windows it is too coarse for a kernel.
CLOCK = (
    time.thread_time
    if time.get_clock_info("thread_time").resolution < 1e-5
    else time.perf_counter
)


@dataclass(frozen=True, slots=True)
class Reference:
    """Sizes of the transformer; its parameters and their optimizer state exceed common caches.

    Attributes:
        width: size of a token's vector.
        batch: samples of a rank.
        length: tokens of a sample.
    """

    width: int = 320
    heads: int = 5
    layers: int = 4
    batch: int = 4
    length: int = 128
    vocabulary: int = 2048


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
    slope, latency = (
        torch.linalg.lstsq(rows, torch.ones_like(rows[:, :1])).solution[:, 0].tolist()
    )
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
        "gloo",
        store=file_store,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=5),
    )
    mesh = init_mesh({"shard": ranks}, device="cpu", shared_memory=shared_memory)
    torch.save(measure(mesh, sizes, reference), Path(folder, f"rank{rank}.pt"))
    dist.destroy_process_group()


def _describe(
    measured: Sequence[Mapping[str, Any]], ranks: int, shared_memory: bool
) -> Hardware:
    carriers = ("shm", "shared memory", ""), ("gloo", "gloo", " --gloo")
    carrier_name, carrier_text, command_option = carriers[not shared_memory]
    today = datetime.date.today().isoformat()
    source = Source(
        f"measured by python -m funcshard calibrate{command_option} on {_cpu()}, {today}"
    )

    def mean(figure: str) -> float:
        return statistics.mean(figures[figure] for figures in measured)

    best_times: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for kind, size in measured[0]["collectives"]:
        rank_times = zip(
            *(figures["collectives"][kind, size] for figures in measured), strict=True
        )
        # Note: the mean over ranks is one run, and the fastest run counts.
        best_times[kind][size] = min(map(statistics.mean, rank_times))
    links = tuple(fit_link(kind, ranks, best_times[kind], source) for kind in KINDS)
    peak_flops = {
        dtype: statistics.mean(figures["flops"][dtype] for figures in measured)
        for dtype in measured[0]["flops"]
    }
    memory_bandwidth = mean("memory_bandwidth")
    step_source = Source(f"{source.text}, in a training step of a transformer")
    return Hardware(
        name=f"cpu-{ranks}x-{carrier_name}",
        about=f"{_cpu()}; {ranks} ranks with one thread each, {carrier_text}.",
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks,
        memory_bandwidth=memory_bandwidth,
        flops=peak_flops,
        flops_efficiency=min(1.0, mean("step_flops") / peak_flops["float32"]),
        memory_efficiency=min(1.0, mean("step_bandwidth") / memory_bandwidth),
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


# --- what a rank measures -------------------------------------------------------------------------


class KernelTime(NamedTuple):
    """The FLOPs of a kernel, the bytes that it moves, and its seconds."""

    flops: int
    bytes: int
    seconds: float


class KernelTimes(TorchDispatchMode):
    """Time each kernel of a step by ``CLOCK``, also in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[KernelTime] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        start_seconds = CLOCK()
        out = func(*args, **kwargs)
        seconds = CLOCK() - start_seconds
        new_results = new_tensors((args, kwargs), out)
        # Note: a kernel makes a tensor or writes to one. Other operations make views.
        if new_results or writes_inputs(func):
            kernel_bytes = moved_bytes(func, args, kwargs, new_results)
            self.kernels.append(
                KernelTime(count_flops(func, args, kwargs, out), kernel_bytes, seconds)
            )
        return out


class _Block(nn.Module):
    """Causal attention and an MLP, both after a norm."""

    # Why not torch's TransformerEncoderLayer: it copies more, and its copies are faster than the
    # other kernels.
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries, self.keys, self.values, self.out = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (
            projection(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.queries, self.keys, self.values)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def reference_step(
    reference: Reference,
) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Return forward and backward, the update by AdamW, and the bytes that the update moves."""
    width, batch_shape = reference.width, (reference.batch, reference.length)
    embedding = nn.Embedding(reference.vocabulary, width)
    head = nn.Linear(width, reference.vocabulary)
    blocks = nn.ModuleList(_Block(width, reference.heads) for _ in range(reference.layers))
    final_norm = nn.LayerNorm(width)
    params = [*nn.ModuleList([embedding, blocks, final_norm, head]).parameters()]
    optimizer = torch.optim.AdamW(params, fused=True)
    tokens = (
        torch.arange(batch_shape[0] * batch_shape[1], device="cpu").view(batch_shape)
        % reference.vocabulary
    )

    def train() -> None:
        for param in params:
            param.grad = None
        x = embedding(tokens)
        for block in blocks:
            x = block(x)
        F.cross_entropy(head(final_norm(x)).flatten(0, 1), tokens.flatten()).backward()

    def update() -> None:
        optimizer.step()

    # Why seven: it reads the gradient, and reads and writes the parameter and its two moments.
    return train, update, 7 * sum(param.nbytes for param in params)


def times_of(run: Callable[[], object]) -> list[KernelTime]:
    """Return the kernels of a computation."""
    with KernelTimes() as times:
        run()
    return times.kernels


def rates_of(
    runs: Sequence[Sequence[KernelTime]], seconds: float, kernel_overhead: float
) -> tuple[float, float]:
    """Return the rates with which the estimate of a computation is as long as the measurement.

    They are FLOP/s of the kernels that have FLOPs, and bytes per second of all other kernels.

    Arguments:
        runs: the kernels of each of several runs, as ``times_of`` returns them.
        seconds: time of the computation without a clock around each kernel.

    Example:
        >>> rates_of([[KernelTime(600, 10, 3.0), KernelTime(0, 20, 1.0)]], 8.0, kernel_overhead=0.0)
        (100.0, 10.0)
    """
    # Note: a median over runs, because other programs slow single kernels down.
    typical_kernels = [
        kernel_runs[0]._replace(
            seconds=statistics.median(timed_run.seconds for timed_run in kernel_runs)
        )
        for kernel_runs in zip(*runs, strict=True)
    ]
    flop_kernels = [kernel for kernel in typical_kernels if kernel.flops]
    other_kernels = [kernel for kernel in typical_kernels if not kernel.flops]
    # Why a least: tiny kernels take no longer than their overhead.
    seconds_left = max(seconds - kernel_overhead * len(typical_kernels), 0.1 * seconds)
    time_scale = seconds_left / sum(kernel.seconds for kernel in typical_kernels)
    return (
        sum(kernel.flops for kernel in flop_kernels)
        / (time_scale * sum(kernel.seconds for kernel in flop_kernels)),
        sum(kernel.bytes for kernel in other_kernels)
        / (time_scale * sum(kernel.seconds for kernel in other_kernels)),
    )


def measure(
    mesh: Mesh, sizes: Sequence[int], reference: Reference, *, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Return this rank's figures by name. All ranks of the mesh call it together.

    Arguments:
        sizes: bytes of the collectives' whole buffers.
    """
    group = mesh.groups["shard"]
    # Why not always: ranks that share a core wait for each other, which is part of their step.
    clock = CLOCK if group.size <= cores() else time.perf_counter
    # By figure: a run, and its FLOPs or bytes.
    peak_runs: dict[str, tuple[Callable[[], Any], int]] = {
        "memory_bandwidth": (
            functools.partial(torch.add, _ones(TENSOR), _ones(TENSOR)),
            3 * TENSOR,
        ),
        "copy": (functools.partial(_ones(TENSOR).copy_, _ones(TENSOR)), TENSOR),
    }
    for dtype in DTYPES:
        m, k, n = PRODUCT if dtype == torch.float32 else SMALL
        factors = [
            torch.ones(shape, dtype=dtype, device="cpu") for shape in ((m, k), (k, n))
        ]
        peak_runs[dtype_name(dtype)] = (
            functools.partial(torch.matmul, *factors),
            2 * m * k * n,
        )
    collectives = {
        (kind, size): _collective(group, kind, size) for kind in KINDS for size in sizes
    }
    swept_memory = _ones(2 * max(sizes))
    train_step, update_step, updated_bytes = reference_step(reference)
    runs: dict[Any, Callable[[], Any]] = {name: run for name, (run, _) in peak_runs.items()}
    runs.update(kernels=_small_kernels, train=train_step, update=update_step)
    runs.update(collectives)
    seconds: dict[Any, list[float]] = {key: [] for key in runs}
    kernel_runs = []
    train_step()
    update_step()  # the first update makes the optimizer's state
    for _ in range(rounds):
        for key, run_once in runs.items():
            run_clock = clock
            if key in collectives:
                # Note: empties the caches, as the computations between two collectives of a step
                # do.
                swept_memory.add_(1)
                run_clock = time.perf_counter
            # Note: so that all ranks begin together.
            _reduce(group, "all_reduce", torch.zeros(1, dtype=torch.float32, device="cpu"))
            begin_seconds = run_clock()
            run_once()
            seconds[key].append(run_clock() - begin_seconds)
        kernel_runs.append(times_of(train_step))
    # Note: other programs only add time, so the fastest run is the truest.
    kernel_overhead = min(seconds["kernels"]) / (2 * KERNELS)
    peaks = {name: amount / min(seconds[name]) for name, (_, amount) in peak_runs.items()}
    step_flops, step_bandwidth = rates_of(
        kernel_runs, statistics.median(seconds["train"]), kernel_overhead
    )
    return {
        "collectives": {key: seconds[key] for key in collectives},
        "memory_bandwidth": peaks.pop("memory_bandwidth"),
        "copy": peaks.pop("copy"),
        # Note: the two lines above have taken out what is no dtype.
        "flops": peaks,
        "kernel_overhead": kernel_overhead,
        "step_flops": step_flops,
        "step_bandwidth": step_bandwidth,
        "update": updated_bytes / statistics.median(seconds["update"]),
    }


def _collective(group: Group, kind: str, size: int) -> Callable[[], Any]:
    """Return a function that runs one collective whose event has ``size`` bytes."""
    ranks = group.size
    whole_tensor = _ones(max(size // 4 // ranks, 1) * ranks * 4)
    shard = whole_tensor[: whole_tensor.numel() // ranks].clone()
    gradient_parts = [
        part_numel.clone() for part_numel in whole_tensor.tensor_split(LEAVES)
    ]
    if kind == "all_gather":
        return lambda: group.all_gather_last(shard, shared=True).wait()
    # Note: a reduction also joins gradients and divides the sum, as in a training step.
    if kind == "reduce_scatter":
        return lambda: _reduce(group, kind, torch.empty_like(shard), gradient_parts)
    return lambda: _reduce(group, kind, torch.cat(gradient_parts))


def _reduce(group: Group, kind: str, out: torch.Tensor, grads: Any = None) -> None:
    group.start(Op(kind, "", out, grads)).wait()
    out.div_(group.size)


def _ones(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")


def _small_kernels() -> None:
    x = y = torch.ones(16, requires_grad=True, dtype=torch.float32, device="cpu")
    for _ in range(KERNELS):
        y = y * 1.0
    torch.autograd.grad(y.sum(), x)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
