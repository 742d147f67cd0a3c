"""What ``measure`` runs has the sizes and the dtypes that its figures are divided by."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import funcshard as fs
from funcshard.comm import Op as Collective
from funcshard.comm import PrivateAllGatherWork
from funcshard.comm.group import DeferredWork
from funcshard.estimate.machine import calibration
from funcshard.estimate.machine.calibration import KernelTime, Reference, rates_of, reference_step, times_of
from funcshard.estimate.trace.tape import Op
from tests.estimate.chains import expanded


class Operations(TorchDispatchMode):
    """Notes the dtypes and the numbers of bytes of what each operation takes and makes."""

    def __init__(self) -> None:
        super().__init__()
        self.used: defaultdict[str, set[tuple[torch.dtype, int]]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, out) if isinstance(each, torch.Tensor)]
        self.used[func._schema.name.partition("::")[2]] |= {(each.dtype, each.nbytes) for each in tensors}
        return out


@dataclass
class Recorded:
    """A group of two ranks that notes the bytes of the whole buffer of each collective, and never communicates."""

    rank: int = 0
    size: int = 2
    sent: list[tuple[torch.dtype, int]] = field(default_factory=list)
    running: int = 0

    def _note(self, tensor: torch.Tensor, ranks: int = 1) -> Any:
        self.sent.append((tensor.dtype, tensor.nbytes * ranks))
        self.running += 1
        return DeferredWork(self._end)

    def _end(self) -> None:
        self.running -= 1

    def all_gather_last(self, shard: torch.Tensor, *, shared: bool) -> PrivateAllGatherWork:
        return PrivateAllGatherWork(shard, self._note(shard, self.size))

    def start(self, op: Collective) -> Any:
        if op.kind == "all_reduce":
            return self._note(op.out)
        assert sum(part.nbytes for part in op.data) == self.size * op.out.nbytes
        return self._note(op.out, self.size)


@pytest.mark.parametrize("kind", calibration.KINDS)
def test_a_collective_moves_float32_of_the_size_that_its_figure_has_to_the_end(kind: str) -> None:
    group = Recorded()
    calibration._collective(group, kind, 4096)()
    assert group.sent == [(torch.float32, 4096)]
    assert not group.running


def test_peaks_are_of_the_sizes_that_they_are_divided_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "reference_step", lambda reference: (lambda: None, lambda: None, 1))
    monkeypatch.setattr(calibration, "times_of", lambda train: [])
    monkeypatch.setattr(calibration, "rates_of", lambda *_: (1.0, 1.0))
    group = Recorded()
    mesh = type("Alone", (), {"groups": {"shard": group}})()
    with Operations() as operations:
        found = calibration.measure(mesh, [4096], None, rounds=3)  # type: ignore[arg-type]
    assert operations.used["add"] == {(torch.float32, calibration.TENSOR)}
    assert operations.used["copy_"] == {(torch.float32, calibration.TENSOR)}
    assert {dtype for dtype, _ in operations.used["mm"]} == set(calibration.DTYPES)
    assert operations.used["mul"] == {(torch.float32, 64)}
    assert operations.used["add_"] == {(torch.float32, 2 * 4096)}  # the sweep through memory
    # Ranks start each figure together.
    figures = len(calibration.DTYPES) + 2 + len(found["collectives"]) + 3
    assert group.sent.count((torch.float32, 4)) == 3 * figures
    assert not group.running
    assert all(0 < found["flops"][name] < math.inf for name in ("float32", "float64", "bfloat16"))


# --- the reference step ---------------------------------------------------------------------------

TINY = Reference(width=16, heads=2, layers=2, batch=2, length=8, vocabulary=11)


def test_kernels_are_counted_as_in_a_trace() -> None:
    """The calibrated rates are those of the trace's FLOPs and bytes, so both must count alike."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    x, loss = torch.ones(4, 8), lambda out, _: out.square().mean()
    profile = fs.profile(*fs.make_functional(module), x, loss=loss, targets=torch.zeros(()))
    traced = [each for each in expanded(profile.tape()) if isinstance(each, Op)]
    timed = times_of(lambda: loss(module(x), None).backward())
    assert sum(each.flops for each in timed) == sum(each.flops for each in traced) > 0
    assert sum(each.bytes for each in timed if each.flops) == sum(each.bytes for each in traced if each.flops)
    assert sum(each.bytes for each in timed) == sum(each.bytes for each in traced)
    assert all(each.seconds >= 0 for each in timed)


def test_the_step_trains() -> None:
    train, update, moved = reference_step(TINY)
    kernels = times_of(train)
    assert sum(each.flops for each in kernels) > 0
    assert any(not each.flops for each in kernels)
    update()
    assert [each[:2] for each in times_of(train)] == [each[:2] for each in kernels]
    embedding, norm, head = 11 * 16, 2 * 16, 17 * 11
    block = 4 * 17 * 16 + 2 * 4 * 16 * 16 + 5 * 16 + 4 * 16
    assert moved == 7 * 4 * (embedding + norm + head + 2 * block)


@pytest.mark.parametrize(
    ("seconds", "overhead", "flops", "bandwidth"),
    [
        (4.0, 0.0, 100.0, 10.0),  # the kernels' own times
        (8.0, 0.0, 50.0, 5.0),  # the step is longer than its kernels: both are slower
        (8.0, 2.0, 100.0, 10.0),  # the rest is overhead of two kernels
        (8.0, 9.0, 500.0, 50.0),  # overhead takes at most nine tenths
    ],
)
def test_rates(seconds: float, overhead: float, flops: float, bandwidth: float) -> None:
    runs = [[KernelTime(300, 7, taken), KernelTime(0, 10, 1.0)] for taken in (2.0, 3.0, 99.0)]  # the median counts
    assert rates_of(runs, seconds, overhead) == pytest.approx((flops, bandwidth))
