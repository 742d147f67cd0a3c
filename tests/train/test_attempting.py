"""A step that fails on some ranks leaves all of them as they were, and their groups in order."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from funcshard._utils.torch_groups import default_store
from funcshard.comm import Op
from tests.core.units import of_module, same_bits
from tests.ranks import run_ranks, run_simulated

WIDTH = 260  # a buffer is then large enough for an all-reduce of two phases


class Stop(torch.autograd.Function):
    """The identity, whose backward raises if ``fails()``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: Any) -> torch.Tensor:
        ctx.fails = fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.fails():
            raise torch.OutOfMemoryError("no memory in backward")
        return grad, None


@dataclasses.dataclass
class Trouble:
    """Where the step of this rank fails; ``""`` for nowhere."""

    place: str = ""

    def __deepcopy__(self, memo: Any) -> Trouble:  # copies of a module share it
        return self

    def at(self, place: str) -> None:
        if self.place == place:
            raise ValueError(f"trouble in {place}")


class Block(nn.Module):
    def __init__(self, number: int, trouble: Trouble) -> None:
        super().__init__()
        self.linear, self.number, self.trouble = nn.Linear(WIDTH, WIDTH), number, trouble

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trouble.at(f"forward {self.number}")
        x = Stop.apply(x, lambda: self.trouble.place == f"backward {self.number}")
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), 0.2)


def train(
    world: fs.Mesh, failing: Sequence[Mapping[int, str]], shape: Any, shared_memory: bool, options: Mapping[str, Any]
) -> Any:
    """Take a step for each item of ``failing``, before which a step fails in these places, by rank."""
    mesh = fs.init_mesh(shape, device="cpu", shared_memory=shared_memory)
    torch.manual_seed(0)
    trouble = Trouble()
    plan, sharded, shards = of_module(mesh, nn.Sequential(*(Block(i, trouble) for i in range(3))), ["*"], **options)

    def loss_fn(shards: Any, buffers: Any, batch: torch.Tensor) -> torch.Tensor:
        trouble.at("data")
        return sharded(shards, buffers, batch).square().mean()

    def on_grads(unit: str, grads: Any) -> Any:
        trouble.at("gradient")
        return grads

    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-2)
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, max_norm=1.0, on_grads=on_grads)

    def step_to_the_end(state: Any, batch: Any) -> Any:
        result = step(state, batch)
        trouble.at("end")
        return result

    state, losses, failures = step.init(shards, {}), [], []
    torch.manual_seed(mesh.rank)
    for number, places in enumerate(failing):
        batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * number + mesh.rank))
        if places:
            trouble.place = places.get(mesh.rank, "")
            before = tree.leaves(fs.copy(state))
            result, failed = fs.attempt(step_to_the_end, state, batch, mesh=mesh)
            assert result is None
            same_bits(before, tree.leaves(state))
            failures.append(failed)
            trouble.place = ""
        result, none = fs.attempt(step, state, batch, mesh=mesh)
        assert none == {}
        assert result is not None
        state, metrics = result
        losses.append(metrics["loss"].item())
    return failures, losses, *tree.leaves(state), torch.rand(1)


PLACES = ("data", "forward 0", "forward 2", "backward 2", "backward 1", "gradient", "end")
ONE, SEVERAL = [{1: place} for place in PLACES], [{0: "backward 2", 1: "forward 1"}, {0: "gradient", 1: "gradient"}]
HYBRID = {"replicate": 2, "shard": 2}
CASES: dict[str, tuple[Any, int, Any, bool, dict[str, Any]]] = {
    "simulated, hybrid": (run_simulated, 4, HYBRID, False, {"strategy": "shard_grad_op"}),
    "simulated": (run_simulated, 3, None, False, {}),
    "shared memory": (run_ranks, 2, None, True, {}),
    "shared memory, hybrid": (run_ranks, 4, HYBRID, True, {}),
    "gloo": (run_ranks, 2, None, False, {"strategy": "shard_grad_op"}),
}


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("case", CASES)
def test_a_failed_step_is_as_if_it_had_never_run(case: str) -> None:
    run, ranks, *options = CASES[case]
    failing = [*ONE, *SEVERAL]
    meant = run(train, ranks, [{}] * len(failing), *options)
    for ours, theirs in zip(run(train, ranks, failing, *options), meant, strict=True):
        same_bits(ours[1:], theirs[1:])
        for places, failed in zip(failing, ours[0], strict=True):
            assert failed.keys() == places.keys()
            for rank, text in failed.items():
                error = "OutOfMemoryError: no memory" if places[rank].startswith("back") else "ValueError: trouble"
                assert text.startswith(error)
                assert places[rank].split()[0] in text


class Trap:
    """Calls functions, and raises in place of one of the calls."""

    def __init__(self, calls: int | None) -> None:
        self.left = calls

    def __call__(self, function: Any = lambda: None, *args: Any, **options: Any) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyError("trap")
        return function(*args, **options)


def collectives(x: torch.Tensor, mesh: fs.Mesh, trap: Trap) -> torch.Tensor:
    """Communicate in every way, with sizes that depend on values, and raise in between."""
    total = trap(fs.psum, x, mesh)
    rows = trap(fs.all_gather, x, mesh)
    part = trap(fs.psum_scatter, total.repeat(mesh.world_size, 1), mesh)
    moved = trap(fs.ppermute, x, mesh, [(i, (i + 1) % mesh.world_size) for i in range(mesh.world_size)])
    swapped = trap(fs.all_to_all, rows, mesh)
    counts = torch.tensor([1 + (mesh.rank + i) % 2 for i in range(mesh.world_size)])
    received = torch.empty_like(counts)
    sizes = [1] * mesh.world_size
    trap(mesh.shard.start, Op("all_to_all", "", received, counts, 0, sizes, sizes)).wait()
    tokens, taken = torch.arange(float(counts.sum())), torch.empty(int(received.sum()))
    trap(mesh.shard.start, Op("all_to_all", "", taken, tokens, 0, received.tolist(), counts.tolist())).wait()
    name = trap(fs.broadcast_object, f"rank {mesh.rank}", mesh, src=1)
    large = torch.full((40_000,), float(mesh.rank + len(name)))
    work = trap(mesh.shard.start, Op("all_reduce", "late", large))
    trap(mesh.shard.start, Op("broadcast", "", moved, src=1)).wait()
    trap(work.wait)
    trap()
    return total + rows.sum() + part.sum() + moved + swapped.sum() + taken.sum() + large.sum()


TRAPS = 12


def trapped(mesh: fs.Mesh, shared_memory: bool) -> list[int]:
    """Raise at each place in turn; return the numbers of keys in the store after each success."""
    mesh = fs.init_mesh(device="cpu", shared_memory=shared_memory)
    x, key_counts = torch.arange(3.0) + mesh.rank, []
    meant = collectives(x, mesh, Trap(None))
    for calls in range(TRAPS):
        failing = {calls % mesh.world_size: calls} | ({0: 2} if calls > 6 else {})
        result, failures = fs.attempt(collectives, x, mesh, Trap(failing.get(mesh.rank)), mesh=mesh)
        assert result is None
        # Note: what ranks compute with zeros may fail too, but only after that.
        assert next(iter(failures)) == min(failing, key=lambda rank: failing[rank])
        assert dict.fromkeys(failing, "KeyError: 'trap'").items() <= failures.items()
        result, failures = fs.attempt(collectives, x, mesh, Trap(None), mesh=mesh)
        assert failures == {}
        assert torch.equal(result, meant)
        key_counts.append(default_store().num_keys() if dist.is_initialized() else 0)
    return key_counts


def test_a_rank_may_fail_between_any_two_collectives() -> None:
    run_simulated(trapped, 3, False)


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
def test_a_process_may_fail_between_any_two_collectives_and_leaves_no_keys_in_the_store(shared_memory: bool) -> None:
    for key_counts in run_ranks(trapped, 3, shared_memory):
        assert len(set(key_counts)) == 1


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("name", ["SGD", "muon"])
def test_no_step_in_an_attempt_donates_its_state(name: str) -> None:
    def main(mesh: fs.Mesh) -> None:
        net = nn.Linear(6, 4)
        net.bias.requires_grad_(False)
        plan, sharded, shards = of_module(mesh, net)
        loss_fn = lambda shards, _, batch: sharded(shards, {}, batch).square().mean()  # noqa: E731
        optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        if name == "muon":
            optimizer = fs.muon(plan, mesh, lr=0.1)
        step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
        batch = torch.ones(2, 6)
        state = start = step.init(shards, {})
        traced, _ = fs.attempt(fs.trace, step, fs.copy(state), batch, mesh=mesh)
        assert traced is not None
        for _ in range(3):
            before = tree.leaves(fs.copy(state))
            pair: Any = fs.attempt(lambda state: (traced(state, batch), Trap(mesh.rank)()), state, mesh=mesh)
            assert pair == (None, {0: "KeyError: 'trap'"})
            results = [fs.attempt(run, state, batch, mesh=mesh)[0] for run in (step, traced)]
            same_bits(before, tree.leaves(state))
            same_bits(*(tree.leaves(result) for result in results))
            state = results[0][0]
        traced(start, batch)  # which donates outside
        with pytest.raises(RuntimeError, match="donated"):
            fs.copy(start)

    fs.simulate(main, 2)


def donating(mesh: fs.Mesh) -> Any:
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
    params = {"w": torch.ones(4)}

    def step(params: Any) -> None:
        optimizer.step({"w": torch.ones(4)}, optimizer.init(params), params)
        Trap(mesh.rank)()

    fs.attempt(step, params, mesh=mesh)


def nested(mesh: fs.Mesh) -> Any:
    _, failures = fs.attempt(lambda: fs.attempt(print, mesh=mesh), mesh=mesh)
    raise RuntimeError(failures[0])


def differing(mesh: fs.Mesh) -> Any:
    fs.attempt(lambda: fs.psum(torch.ones(2, dtype=(torch.float32, torch.float64)[mesh.rank]), mesh), mesh=mesh)


def inside(mesh: fs.Mesh, other_fails: bool = False) -> Any:
    def step() -> None:
        if other_fails and mesh.rank:
            raise ValueError("data")
        text = "" if mesh.rank else Unreadable()
        mesh.shard.all_gather_text(text)  # type: ignore[arg-type]

    fs.attempt(step, mesh=mesh)


class Unreadable(str):
    def encode(self, *_: Any) -> bytes:
        raise MemoryError("no memory for a text")


def caught(mesh: fs.Mesh, name: str, shared_memory: bool) -> str:
    mesh = fs.init_mesh(device="cpu", shared_memory=shared_memory, patience=0.5)
    try:
        HOPELESS[name][0](mesh)
    except RuntimeError as error:
        return str(error)
    return "no error"


HOPELESS: dict[str, tuple[Any, str]] = {
    "donating": (donating, "a step that failed has donated its arguments"),
    "nested": (nested, "attempt was called inside the step of another attempt"),
    "differing": (differing, "ranks issue different collectives"),
    "inside": (inside, "inside a collective|rank 1 waited|Connection closed|ended"),
    "inside, after a failure": (lambda mesh: inside(mesh, True), "a step failed inside a collective"),
}


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("name", HOPELESS)
def test_what_cannot_be_attempted_again_raises_on_every_rank(name: str, shared_memory: bool) -> None:
    for message in run_ranks(caught, 2, name, shared_memory):
        assert re.search(HOPELESS[name][1], message), message


def lost(mesh: fs.Mesh) -> str:
    mesh = fs.init_mesh(device="cpu", patience=0.5, give_up=2.0)

    def step() -> None:
        if mesh.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("data")

    try:
        fs.attempt(step, mesh=mesh)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_attempt() -> None:
    _, message = run_ranks(lost, 2, may_die=[0])
    assert "rank 0" in message
    assert "has ended" in message
