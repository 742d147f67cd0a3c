"""``measure``: the figures of one rank, while all ranks work at once.

Peaks are those of the fastest run. Efficiencies come from the reference step, a training step of a
small transformer that is timed kernel by kernel: kernels read cold operands, several functions take
more time than a sum, and all ranks compute at once. A collective is measured after a sweep through
memory that empties the caches.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from funcshard._utils.tensors import tensors_in
from funcshard._utils.torch_operators import count_flops, writes_inputs
from funcshard._utils.torch_private import TorchDispatchMode, storage_id
from funcshard.comm import Group, Mesh
from funcshard.estimate.machine.timing import KINDS
from funcshard.plan import dtype_name

PRODUCT = (512, 384, 1536)  # m, k and n of a product in float32
SMALL = (128, 384, 384)  # for other dtypes, which many CPUs multiply a hundred times slower
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
KERNELS = 50  # small products in a row; forward and backward have a kernel for each
LEAVES = 8  # gradients that a reduction joins
TENSOR = 1 << 24  # bytes of the tensors of an addition
ROUNDS = 15  # over all figures, so that a burst of other work spoils only one

# Processor time, so that other programs do not count; on Windows it is too coarse for a kernel.
CLOCK = (
    time.thread_time if time.get_clock_info("thread_time").resolution < 1e-5 else time.perf_counter
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


class KernelTime(NamedTuple):
    """The FLOPs of a kernel, the bytes that it moves, and its seconds."""

    flops: int
    bytes: int
    seconds: float


class StepRates(NamedTuple):
    """FLOP/s of the kernels that have FLOPs, and bytes per second of all other kernels."""

    flops: float
    bandwidth: float


class KernelTimes(TorchDispatchMode):
    """Time each kernel of a step by ``CLOCK``, also in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[KernelTime] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start_seconds = CLOCK()
        out = func(*args, **kwargs)
        seconds = CLOCK() - start_seconds
        inputs, results = list(tensors_in((args, kwargs))), list(tensors_in(out))
        known_storages = {storage_id(tensor) for tensor in inputs}
        # Note: a kernel makes a tensor or writes to one. Other operations make views.
        if results and (
            writes_inputs(func)
            or any(storage_id(tensor) not in known_storages for tensor in results)
        ):
            moved_bytes = sum(
                tensor.numel() * tensor.element_size() for tensor in (*inputs, *results)
            )
            self.kernels.append(
                KernelTime(count_flops(func, args, kwargs, out), moved_bytes, seconds)
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
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (
            projection(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.queries, self.keys, self.values)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def reference_step(reference: Reference) -> tuple[Callable[[], None], Callable[[], None], int]:
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
) -> StepRates:
    """Return the rates with which the estimate of a computation is as long as the measurement.

    Arguments:
        runs: the kernels of each of several runs, as ``times_of`` returns them.
        seconds: time of the computation without a clock around each kernel.

    Example:
        >>> rates_of([[KernelTime(600, 10, 3.0), KernelTime(0, 20, 1.0)]], 8.0, kernel_overhead=0.0)
        StepRates(flops=100.0, bandwidth=10.0)
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
    return StepRates(
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
            _ones(4 * size).view(shape).to(dtype)
            for size, shape in ((m * k, (m, k)), (k * n, (k, n)))
        ]
        peak_runs[dtype_name(dtype)] = functools.partial(torch.matmul, *factors), 2 * m * k * n
    collectives = {(kind, size): _collective(group, kind, size) for kind in KINDS for size in sizes}
    swept_memory = _ones(2 * max(sizes))
    train_step, update_step, updated_bytes = reference_step(reference)
    best_seconds = dict.fromkeys(peak_runs, math.inf)
    link_seconds: dict[Any, list[float]] = {key: [] for key in collectives}
    kernel_seconds, train_seconds, kernel_runs, update_seconds = [], [], [], []
    train_step()
    update_step()  # the first update makes the optimizer's state
    for _ in range(rounds):
        for name, (run_once, _) in peak_runs.items():
            _together(group)
            # Note: other programs only add time, so the fastest run is the truest.
            best_seconds[name] = min(best_seconds[name], _clock(run_once, now=clock))
        kernel_seconds.append(_clock(_small_kernels, now=clock))
        for key, run_collective in collectives.items():
            # Note: empties the caches, as the computations between two collectives of a step do.
            swept_memory.add_(1)
            _together(group)
            link_seconds[key].append(_clock(run_collective))
        _together(group)
        train_seconds.append(_clock(train_step, now=clock))
        update_seconds.append(_clock(update_step, now=clock))
        kernel_runs.append(times_of(train_step))
    kernel_overhead = min(kernel_seconds) / (2 * KERNELS)
    peaks = {name: amount / best_seconds[name] for name, (_, amount) in peak_runs.items()}
    return {
        "collectives": link_seconds,
        "memory_bandwidth": peaks.pop("memory_bandwidth"),
        "copy": peaks.pop("copy"),
        "flops": peaks,
        "kernel_overhead": kernel_overhead,
        "rates": tuple(rates_of(kernel_runs, statistics.median(train_seconds), kernel_overhead)),
        "update": updated_bytes / statistics.median(update_seconds),
    }


def _collective(group: Group, kind: str, size: int) -> Callable[[], Any]:
    """Return a function that runs one collective whose event has ``size`` bytes."""
    ranks = group.size
    whole_tensor = _ones(max(size // 4 // ranks, 1) * ranks * 4)
    shard = whole_tensor[: whole_tensor.numel() // ranks].clone()
    gradient_parts = [part_numel.clone() for part_numel in whole_tensor.tensor_split(LEAVES)]
    if kind == "all_gather":
        return lambda: group.all_gather_shared(shard).wait()
    # Note: a reduction also joins gradients and divides the sum, as in a training step.
    if kind == "reduce_scatter":
        return lambda: _reduce(group.reduce_scatter, ranks, torch.empty_like(shard), gradient_parts)
    return lambda: _reduce(group.all_reduce, ranks, torch.cat(gradient_parts))


def _reduce(start: Callable[..., Any], ranks: int, out: torch.Tensor, *grads: Any) -> None:
    start(out, *grads).wait()
    out.div_(ranks)


def _ones(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")


def _together(group: Group) -> None:
    group.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu")).wait()


def _clock(run: Callable[[], Any], *, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a ``run``."""
    start = now()
    run()
    return now() - start


def _small_kernels() -> None:
    x = y = torch.ones(16, requires_grad=True, dtype=torch.float32, device="cpu")
    for _ in range(KERNELS):
        y = y * 1.0
    torch.autograd.grad(y.sum(), x)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
