"""What ``measure`` runs has the sizes and the dtypes that its figures are divided by."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funcshard.comm import PrivateAllGatherWork
from funcshard.comm.group import DeferredWork
from funcshard.estimate.machine import measuring


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

    def all_gather_shared(self, shard: torch.Tensor) -> PrivateAllGatherWork:
        return PrivateAllGatherWork(shard, self._note(shard, self.size))

    def reduce_scatter(self, out: torch.Tensor, parts: list[torch.Tensor]) -> Any:
        assert sum(part.nbytes for part in parts) == self.size * out.nbytes
        return self._note(out, self.size)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return self._note(tensor)


@pytest.mark.parametrize("kind", measuring.KINDS)
def test_a_collective_moves_float32_of_the_size_that_its_figure_has_to_the_end(kind: str) -> None:
    group = Recorded()
    measuring._collective(group, kind, 4096)()
    assert group.sent == [(torch.float32, 4096)]
    assert not group.running


def test_peaks_are_of_the_sizes_that_they_are_divided_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "reference_step", lambda reference: (lambda: None, lambda: None, 1))
    monkeypatch.setattr(measuring, "times_of", lambda train: [])
    monkeypatch.setattr(measuring, "rates_of", lambda *_: ())
    group = Recorded()
    mesh = type("Alone", (), {"groups": {"shard": group}})()
    with Operations() as operations:
        found = measuring.measure(mesh, [4096], None, rounds=3)  # type: ignore[arg-type]
    assert operations.used["add"] == {(torch.float32, measuring.TENSOR)}
    assert operations.used["copy_"] == {(torch.float32, measuring.TENSOR)}
    assert {dtype for dtype, _ in operations.used["mm"]} == set(measuring.DTYPES)
    assert operations.used["mul"] == {(torch.float32, 64)}
    assert operations.used["add_"] == {(torch.float32, 2 * 4096)}  # the sweep through memory
    # Ranks start each figure together.
    figures = len(measuring.DTYPES) + 2 + len(found["collectives"]) + 1
    assert group.sent.count((torch.float32, 4)) == 3 * figures
    assert not group.running
    assert all(0 < found["flops"][name] < math.inf for name in ("float32", "float64", "bfloat16"))
