"""A small job that trains, saves and restores, and whose state at every step is known to the bit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from tests.hostile.campaign import Campaign, slowness
from tests.hostile.nursery import Rank, in_nursery, spawn, wait_all

STEPS, KEEP = 9, 2
BOUND = 45.0  # seconds in which ranks start, or end by themselves
SHAPES: tuple[Mapping[str, int], ...] = ({"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}, {"replicate": 2})


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the campaign."""

    folder: Path  # of its checkpoints
    shape: Mapping[str, int]
    shared_memory: bool = True
    steps: int = STEPS - 1
    every: int = 2  # steps between two saves
    waits: bool = False  # whether a save waits until the checkpoint is complete
    timeout: float = 15.0  # as the next two, of fs.init_mesh
    patience: float = 1.0
    give_up: float = 10.0
    forking: Sequence[int] = ()  # ranks that fork a child that outlives them
    digests: Sequence[str] = field(default=(), repr=False)  # of the state after each step, if nothing goes wrong

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape.values())

    @property
    def bound(self) -> float:
        """Seconds in which the ranks end after one was killed."""
        return self.timeout + 30.0  # which a rank that connects waits for, and time for a loaded machine

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, without anything else in it."""
        return self.folder / "checkpoints"

    @classmethod
    def draw(cls, draw: Random, folder: Path, **more: Any) -> Job:
        """Return a job with a random mesh, way of communication and rhythm of saves."""
        shape = draw.choice(SHAPES)
        chosen = {"shared_memory": draw.random() < 0.6, "every": draw.choice([1, 2, 3]), "waits": draw.random() < 0.5}
        more["timeout"] = more.get("timeout", 15.0) * slowness()
        return cls(folder, shape, **chosen, digests=digests(tuple(shape.items())), **more)


@dataclass(frozen=True, slots=True)
class Program:
    """What a rank of the job runs."""

    plan: fs.Plan
    step: Any
    optimizer: Any
    first: Callable[[], Any]
    mesh: fs.Mesh

    def batch(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * 100 + self.mesh.rank)
        return torch.randn(4, 8, generator=generator)

    def digest(self, state: Any) -> str:
        """Return a digest of the whole state; every rank has to call."""
        found = fs.to_state_dict(state.shards, self.plan, self.mesh)
        moments = fs.optimizer_to_state_dict(state.opt_state, self.optimizer, self.plan, self.mesh)
        text = hashlib.sha256(repr(_plain(found)).encode() + repr(_plain(moments)).encode())
        return text.hexdigest()[:16]


def _plain(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tuple(tree.shape), hashlib.sha256(tree.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(tree, Mapping):
        return {key: _plain(tree[key]) for key in sorted(tree, key=str)}  # restored dictionaries are sorted
    return [_plain(each) for each in tree] if isinstance(tree, list | tuple) else tree


def make_program(mesh: fs.Mesh) -> Program:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 16), nn.Tanh(), nn.Linear(16, 5))
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["0", "2", "4"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return (sharded(shards, buffers, x) - x.sum(1, keepdim=True)).square().mean()

    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-2)
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, max_norm=1.0)
    return Program(plan, step, optimizer, lambda: step.init(fs.shard(params, plan, mesh), buffers), mesh)


def digests_on(mesh: fs.Mesh) -> list[str]:
    """Take all steps; return the digest of the first state, and after each step."""
    program = make_program(mesh)
    state = program.first()
    found = [program.digest(state)]
    while state.step < STEPS:
        state, _ = program.step(state, program.batch(state.step))
        found.append(program.digest(state))
    return found


@functools.cache
def digests(shape: tuple[tuple[str, int], ...]) -> list[str]:
    """Return the digests of a run in which nothing goes wrong."""
    return fs.simulate(digests_on, dict(shape))[0]


@dataclass(frozen=True, slots=True)
class Store:
    """A process with the store where ranks meet, as torchrun's agent has one.

    Why a process: a store has threads, and a process that forks ranks must have none.
    """

    pid: int
    port: int

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def meeting_point(world_size: int) -> Store:
    """Start a store for the ranks of one start of a job."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        os.write(writes, str(store.port).encode())
        while True:
            signal.pause()
    os.close(writes)
    port = int(os.read(reads, 100))
    os.close(reads)
    return Store(pid, port)


def start(job: Job, store: Store, name: str = "rank", main: Callable[..., Any] | None = None) -> list[Rank]:
    """Fork the ranks of a job, which begin at its last checkpoint."""
    main, logs = main or train_and_save, [job.folder / f"{name}-{rank}.log" for rank in range(job.world_size)]
    return [spawn(rank_of_job, main, job, rank, store.port, log=log) for rank, log in enumerate(logs)]


def run_job(
    job: Job,
    seconds: float,
    name: str = "rank",
    main: Callable[..., Any] | None = None,
    meanwhile: Callable[[list[Rank]], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Run a job until all ranks have ended, as they have to, inside of ``meanwhile(ranks)``."""
    store = meeting_point(job.world_size)
    ranks = start(job, store, name, main)
    with meanwhile(ranks):
        ended = wait_all(ranks, seconds)
    for rank, each in enumerate(ended):
        assert each.code == 0, f"rank {rank} of {job}: {each.error}\n{each.output}"
    store.close()


def run_campaign(campaign: Campaign, fn: Callable[..., Any], *more: Any, limit: float, **options: Any) -> None:
    """Run the rounds of a campaign: ``fn(job, seed, *more)`` in a nursery, with a random job of an empty folder.

    Arguments:
        campaign: the campaign.
        fn: what a round does; it returns counts.
        more: further arguments of ``fn``.
        limit: seconds that a round may take.
        options: ``short`` and ``full``, as in ``Campaign.run``, and facts of the job that are not random.
    """
    rounds = {name: options.pop(name) for name in ("short", "full")}

    def one(draw: Random) -> Any:
        with empty_folder() as folder:
            return in_nursery(fn, Job.draw(draw, folder, **options), draw.getrandbits(32), *more, limit=limit)

    campaign.run(one, **rounds, limit=limit + 30)


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hostile-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "checkpoints").mkdir()
        yield Path(folder)


def rank_of_job(enter: Callable[[], None], main: Callable[..., Any], job: Job, rank: int, port: int) -> Any:
    """Make the mesh of a rank as under torchrun, and run ``main(enter, mesh, job)``."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(job.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(job.world_size), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    torch.set_num_threads(1)
    enter()
    waits = {"timeout": job.timeout, "patience": job.patience, "give_up": job.give_up}
    mesh = fs.init_mesh(job.shape, device="cpu", shared_memory=job.shared_memory, **waits)
    if rank in job.forking:
        child = os.fork()
        if not child:
            os.execv("/bin/sleep", ["sleep", "60"]) if rank % 2 else time.sleep(60)
            os._exit(0)
    return main(enter, mesh, job)


def train_and_save(enter: Callable[[], None], mesh: fs.Mesh, job: Job) -> None:
    """Restore the last checkpoint, go on to the last step, save on the way, and compare digests.

    The phases are: construction of the mesh, restore, the first step, and each save.
    """
    program = make_program(mesh)
    enter()
    last = fs.latest(job.checkpoints, thorough=True)
    state = program.first() if last is None else fs.restore(last, program.plan, mesh)["train"]
    _compare(program, state, job, "restored")
    enter()
    saving = None
    while state.step < job.steps:
        state, _ = program.step(state, program.batch(state.step))
        if state.step % job.every == 0 or state.step == job.steps:
            enter()
            what = {"train": state, "own": fs.PerRank({"position": state.step * 10 + mesh.rank})}
            path = job.checkpoints / f"step-{state.step}"
            saving = fs.save(path, what, program.plan, mesh, wait=job.waits, after=saving, keep=KEEP)
    _compare(program, state, job, "trained")
    if saving is not None:
        saving.wait(timeout=job.timeout)
    print("step", state.step, flush=True)


class LostError(Exception):
    """The campaign's own finding: a state is not what it has to be."""


def _compare(program: Program, state: Any, job: Job, how: str) -> None:
    found = program.digest(state)
    if found != job.digests[state.step]:
        raise LostError(f"the state that was {how} at step {state.step} has other bits than without faults")
