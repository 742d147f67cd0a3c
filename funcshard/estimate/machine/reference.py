"""The reference step: a training step of a small transformer, timed kernel by kernel.

It says which share of the peaks a model reaches: kernels read cold operands, several functions take
more time than a sum, and all ranks compute at once.
"""

from __future__ import annotations

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
