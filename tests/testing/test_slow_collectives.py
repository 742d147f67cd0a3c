"""Slow collectives: the library waits before it reads, and code that does not wait computes NaN."""

import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from funcshard.comm import DONE, Op, Work, WrappedGroup
from funcshard.testing import KINDS, delayed, slow_collectives
from tests.core.units import of_module
from tests.ranks import run_ranks, run_simulated

SECONDS = 0.004
SLOW = ("all_gather", "reduce_scatter", "all_reduce")
SCHEDULES = {
    "no prefetch": {"forward_prefetch": False, "backward_prefetch": None},
    "pre": {"forward_prefetch": True, "backward_prefetch": "pre", "limit": 2},
    "post": {"forward_prefetch": True, "backward_prefetch": "post"},
}
RUN = {"simulated": run_simulated, "gloo": run_ranks}


def train(mesh: fs.Mesh, kinds: tuple[str, ...], settings: dict, local: tuple[str, ...], pause: float = 0.0) -> Any:
    """Take three steps on a mesh whose ``kinds`` are slow, with a pause before the optimizer."""
    for kind in kinds:
        mesh = delayed(mesh, kind, SECONDS)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(3)]  # the last layer may be local
    net = nn.Sequential(nn.Linear(3, 5), *blocks, nn.Linear(5, 2))
    plan, sharded, shards = of_module(mesh, net, ["1", "2", "3"], schedule=settings, local=local)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
    state = optimizer.init(shards)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(mesh.rank))
    grad = fs.value_and_grad(lambda shards: sharded(shards, {}, x).square().mean())
    losses = []
    for _ in range(3):
        loss, grads = grad(shards)
        time.sleep(pause * (1 + mesh.rank))
        shards, state = optimizer.step(grads, state, shards)
        losses.append(loss)
    with torch.no_grad():
        losses.append(sharded(shards, {}, x).square().mean())
    return [*losses, *tree.leaves(shards), *tree.leaves(fs.gather(shards, plan, mesh)), fs.global_norm(grads, plan, mesh)]


def same(found: list[Any], expected: list[Any]) -> None:
    for rank, (each, other) in enumerate(zip(found, expected, strict=True)):
        assert all(torch.isfinite(value).all() for value in other)
        assert all(torch.equal(a, b) for a, b in zip(each, other, strict=True)), f"rank {rank} read a result too early"


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("ranks", RUN)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_stale_is_gathered_after_a_pause_and_local_experts_wait_for_the_rest(schedule: str, ranks: str) -> None:
    settings, local = SCHEDULES[schedule], ("*.2",)
    slow = RUN[ranks](train, 2, SLOW, settings, local, SECONDS)
    same(slow, run_simulated(train, 2, (), settings, local))


@dataclasses.dataclass(frozen=True)
class Hasty(WrappedGroup):
    """A group whose works of one kind do not wait for the result."""

    kind: str

    def start(self, op: Op) -> Work:
        work = self.inner.start(op)
        return DONE if op.kind == self.kind else work


def hasty(mesh: fs.Mesh, kind: str) -> Any:
    """Return whether loss and gradient are NaN on ranks that do not wait for a slow collective."""
    slow = delayed(mesh, kind, SECONDS)
    broken = fs.Mesh({"shard": Hasty(slow.shard, kind)}, slow.device)
    params = {"w": torch.arange(1.0, 7.0)}
    plan = fs.make_plan(params, mesh, strategy="no_shard" if kind == "all_reduce" else "full_shard")
    f = fs.unshard(lambda leaves: (leaves["w"] ** 2).sum(), plan.units[""], broken)
    loss, grads = fs.value_and_grad(lambda shards: f(shards[""]))(fs.shard(params, plan, mesh))
    return loss.isnan().item(), grads[""]["float32"].isnan().all().item()


@pytest.mark.parametrize("run", RUN.values(), ids=RUN)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all_gather", (True, True)), ("reduce_scatter", (False, True)), ("all_reduce", (False, True))],
    ids=["all_gather", "reduce_scatter", "all_reduce"],
)
def test_a_rank_that_does_not_wait_computes_nan(kind: str, expected: tuple[bool, bool], run: Any) -> None:
    assert run(hasty, 2, kind) == [expected] * 2


def each_kind(mesh: fs.Mesh, kind: str, dtype: torch.dtype) -> Any:
    """Run one slow collective.

    Returns:
        Whether the output was NaN before waiting, whether it was zero, whether it was right after
        waiting, whether a second wait leaves it alone, and whether the delay has passed.
    """
    group = delayed(mesh, kind, 0.05).shard
    whole = torch.arange(4 * group.size).to(dtype)
    part = whole.chunk(group.size)[group.rank].clone()
    out = {"all_gather": torch.ones_like(whole), "reduce_scatter": torch.ones_like(part)}.get(kind, whole.clone())
    sizes = [4] * group.size
    more = {
        "all_gather": (part,), "reduce_scatter": ([whole],), "broadcast": (None, 0),
        "all_to_all": (part.repeat(group.size), 0, sizes, sizes),
    }.get(kind, ())  # fmt: skip
    begin = time.monotonic()
    work = group.start(Op(kind, "", out, *more))
    early = out.clone()
    work.wait()
    took, after = time.monotonic() - begin, out.clone()
    out.zero_()
    work.wait()
    factor = group.size if "reduce" in kind else 1
    expected = (part if kind == "reduce_scatter" else whole) * factor
    return early.isnan().all().item(), not early.any(), torch.equal(after, expected), not out.any(), took >= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_nan_before_the_delay_and_right_after(kind: str, dtype: torch.dtype) -> None:
    has_nan = dtype != torch.int64
    for found in [*run_simulated(each_kind, 3, kind, dtype), each_kind(fs.Mesh(), kind, dtype)]:
        assert found == (has_nan, not has_nan, True, True, True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that goes on only while a delay sleeps: a busy machine takes no time of it."""
    found = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        found.now += seconds

    monkeypatch.setattr(slow_collectives, "time", SimpleNamespace(monotonic=lambda: found.now, sleep=sleep))
    return found


def test_two_delays_that_were_started_together_pass_together(clock: SimpleNamespace) -> None:
    group = delayed(fs.Mesh(), "all_gather", 0.2).shard
    works = [group.start(Op("all_gather", "", torch.zeros(1), torch.ones(1))) for _ in range(5)]
    for work in works:
        work.wait()
    assert clock.now == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_shared_all_gather_is_late_once_and_only_if_its_kind_is_slow(kind: str, clock: SimpleNamespace) -> None:
    work = delayed(fs.Mesh(), kind, 0.2).shard.all_gather_last(torch.ones(1), shared=True)
    assert work.wait() is work.wait()
    work.wait()
    assert clock.now == pytest.approx(0.2 * (kind == "all_gather"))
