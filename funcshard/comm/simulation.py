"""Simulated ranks: the same user code as N ranks, as threads of one process.

One rank runs at a time. It runs until it waits for a collective that another rank has not joined, then the next rank
that can go on takes over, so the interleaving is always the same. Each rank has its own random number generators, put
in place when its turn comes. Because somebody always decides whose turn is next, a deadlock is seen at once: when
nobody can go on, every rank ends with an error that says what each one is waiting for.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from funcshard._utils import RandomState, one_forward_level, transforms_active
from funcshard.comm.group import (
    DONE,
    AllGatherWork,
    DeferredWork,
    Group,
    LocalGroup,
    Work,
    all_gather_private,
    concatenate,
    sum_in_rank_order,
)
from funcshard.comm.mesh import Mesh

__all__ = ["simulate"]

Result = TypeVar("Result")


def simulate(
    fn: Callable[[Mesh], Result],
    world_size: int | Mapping[str, int],
    *,
    device: str | torch.device = "cpu",
    threads: int | None = 1,
) -> list[Result]:
    """Run ``fn(mesh)`` as every rank of a world inside this process, and return each rank's result.

    The collectives add in the order of ranks, as the real ones do, so a simulated run gives the bits of a run on real
    gloo processes that compute on as many threads. Each rank starts from a copy of the caller's random state, as
    processes do from one seed; the caller's own is left as it was. What else is global to a process (environment, default
    dtype, files) is shared by the ranks. So is torch's one level of forward-mode differentiation: it is open as long as the
    simulation runs, so ``torch.func.jvp`` works on every rank, and ``torch.autograd.forward_ad.dual_level`` on none.

    Arguments:
        fn: what one rank does; called with that rank's mesh.
        world_size: number of ranks, or ``{"replicate": R, "shard": S}``.
        device: device of every rank.
        threads: threads that a rank computes on while this runs; ``None`` leaves ``torch.get_num_threads()`` as it is,
            which is slow, because the idle threads of the ranks that wait keep the processors busy.

    Returns:
        The results, in order of ranks.

    Raises:
        Exception: what the first failing rank raised, with a note that names the rank; the other ranks end at their next
            collective.
        RuntimeError: the ranks wait for each other in a way that cannot end, or issue different collectives; it is called
            inside a transform of ``torch.func``.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.simulate(lambda mesh: fs.psum(torch.tensor(mesh.rank), mesh).item(), world_size=4)
        [6, 6, 6, 6]
    """
    sizes = {"shard": world_size} if isinstance(world_size, int) else dict(world_size)
    replicate, shard = sizes.get("replicate", 1), sizes.get("shard", 1)
    if set(sizes) - {"replicate", "shard"} or replicate < 1 or shard < 1:
        raise ValueError(f'world_size must be an int of at least 1 or {{"replicate": R, "shard": S}}; found {world_size}')
    if transforms_active():
        raise RuntimeError(
            "simulate was called inside a torch.func transform, which its ranks, being threads, know nothing of, so that "
            "derivatives would be lost; call the transform inside the function that is simulated"
        )
    world = _World(replicate * shard)
    results: list[Any] = [None] * world.size

    def mesh_of(rank: int) -> Mesh:
        outer, inner = divmod(rank, shard)
        along = {
            "shard": tuple(outer * shard + i for i in range(shard)),
            "replicate": tuple(i * shard + inner for i in range(replicate)),
        }
        groups: dict[str, Group] = {
            axis: _SimulatedGroup(world, members, members.index(rank), axis) if len(members) > 1 else LocalGroup()
            for axis, members in along.items()
        }
        return Mesh(**groups, device=torch.device(device))

    def run(rank: int) -> None:
        torch.set_grad_enabled(grad_enabled)
        try:
            world.take_turn(rank)
            results[rank] = fn(mesh_of(rank))
        except _EndedError:
            pass
        except BaseException as error:
            world.fail(rank, error)
        finally:
            world.leave(rank)

    grad_enabled, before = torch.is_grad_enabled(), RandomState.take(python=True)
    ranks = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank), name=f"rank {rank}", daemon=True)
        for rank in range(world.size)
    ]
    threads_before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        with one_forward_level():
            for thread in ranks:
                thread.start()
            for thread in ranks:
                thread.join()
    except BaseException as error:  # Ctrl-C in the caller: the ranks end at their next collective
        world.fail(None, error)
        raise
    finally:
        torch.set_num_threads(threads_before)
        before.put()
    if world.failure is not None:
        raise world.failure
    return results


class _EndedError(BaseException):
    """Raised in a rank whose world has already failed; no Exception, so that no handler of the rank's own keeps it."""


class _World:
    """Whose turn it is, and the collectives that some rank has joined and another has not."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._turn: int | None = 0
        self._gone: set[int] = set()
        self._waits: dict[int, _Meeting] = {}
        self._random = [RandomState.take(python=True) for _ in range(size)]
        self._joined: dict[tuple[tuple[int, ...], int], int] = {}
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}

    def take_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)
        if self.failure is not None:
            raise _EndedError
        self._random[rank].put()

    def fail(self, rank: int | None, error: BaseException) -> None:
        if self.failure is None:
            if rank is not None:
                error.add_note(f"raised on rank {rank} of {self.size} simulated ranks")
            self.failure = error

    def leave(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            self._next_turn(rank)

    def join(self, members: tuple[int, ...], rank: int, what: _What, tensors: Any) -> _Meeting:
        """Bring this rank's tensors to the next collective of the group; the last to come runs it."""
        world_rank = members[rank]
        number = self._joined[members, rank] = self._joined.get((members, rank), 0) + 1
        meeting = self._meetings.setdefault((members, number), _Meeting(what, members, number, {}))
        if meeting.what != what:
            other = members[next(iter(meeting.brought))]
            raise RuntimeError(
                f"ranks issue different collectives: number {number} on mesh axis {what.axis!r} is {meeting.what} on "
                f"rank {other} and {what} on rank {world_rank}; every rank has to issue the same ones in the same order"
            )
        meeting.brought[rank] = tensors
        if len(meeting.brought) == len(members):
            del self._meetings[members, number]
            meeting.run()
        return meeting

    def wait(self, rank: int, meeting: _Meeting) -> None:
        """Let the other ranks run until ``meeting`` has taken place."""
        if self.failure is not None:
            raise _EndedError
        if meeting.over:
            return
        self._random[rank] = RandomState.take(python=True)
        with self._changed:
            self._waits[rank] = meeting
            self._next_turn(rank)
        self.take_turn(rank)

    def _next_turn(self, rank: int) -> None:
        order = [(rank + i) % self.size for i in range(1, self.size + 1)]
        here = [r for r in order if r not in self._gone]
        ready = [r for r in here if r not in self._waits or self._waits[r].over or self.failure is not None]
        if here and not ready:
            self.fail(None, RuntimeError(self._deadlock()))
            ready = here
        self._turn = ready[0] if ready else None
        if ready:
            self._waits.pop(ready[0], None)
        self._changed.notify_all()

    def _deadlock(self) -> str:
        lines = [
            f"rank {r} has returned" if r in self._gone else f"rank {r} waits in {self._waits[r].describe()}"
            for r in range(self.size)
        ]
        return "simulated ranks wait for each other and none can go on: " + "; ".join(lines)


@dataclass(frozen=True, slots=True)
class _What:
    kind: str
    axis: str
    signature: str
    run: Callable[[list[Any]], None]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _What) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return f"{self.kind} of {self.signature}"


@dataclass(slots=True)
class _Meeting:
    what: _What
    members: tuple[int, ...]
    number: int
    brought: dict[int, Any]
    over: bool = False

    def run(self) -> None:
        self.what.run([self.brought[rank] for rank in range(len(self.members))])
        self.over = True
        self.brought.clear()

    def describe(self) -> str:
        there = ", ".join(str(self.members[rank]) for rank in sorted(self.brought))
        return f"{self.what} (number {self.number} on mesh axis {self.what.axis!r}), which ranks {there} have joined"


@dataclass(frozen=True, slots=True)
class _SimulatedGroup:
    world: _World
    members: tuple[int, ...]
    rank: int
    axis: str

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def global_rank(self) -> int:
        return self.members[self.rank]

    def subgroup(self, members: Sequence[int], axis: str) -> Group:
        return _SimulatedGroup(self.world, tuple(members), members.index(self.global_rank), axis)

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(numel)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Work:
        def run(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for target, _ in pairs:
                for part, (_, piece) in zip(target.chunk(self.size), pairs, strict=True):
                    part.copy_(piece)

        return self._meet("all_gather", run, (out, shard), label) if out.numel() else DONE

    def all_gather_shared(self, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
        return all_gather_private(self, shard, label=label)

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, label: str = "") -> Work:
        def run(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for rank, (target, _) in enumerate(pairs):
                sum_in_rank_order(target, [whole.chunk(self.size)[rank].view_as(target) for _, whole in pairs])

        return self._meet("reduce_scatter", run, (out, concatenate(parts).to(out.dtype)), label) if out.numel() else DONE

    def all_reduce(self, tensor: torch.Tensor, *, label: str = "") -> Work:
        def run(tensors: list[tuple[torch.Tensor]]) -> None:
            total = torch.empty_like(tensors[0][0])
            sum_in_rank_order(total, [each for (each,) in tensors])
            for (each,) in tensors:
                each.copy_(total)

        return self._meet("all_reduce", run, (tensor,), label) if tensor.numel() else DONE

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Work:
        def run(tensors: list[tuple[torch.Tensor]]) -> None:
            for (each,) in tensors:
                each.copy_(tensors[src][0])

        return self._meet(f"broadcast from rank {src}", run, (tensor,), label) if tensor.numel() else DONE

    def all_to_all(
        self, out: torch.Tensor, full: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], *, label: str = ""
    ) -> Work:
        def run(brought: list[tuple[tuple[Any, ...]]]) -> None:
            for rank, ((target, _, wanted, _),) in enumerate(brought):
                sent = [whole.split(list(cuts))[rank] for ((_, whole, _, cuts),) in brought]
                for place, piece in zip(target.split(list(wanted)), sent, strict=True):
                    place.copy_(piece)

        # ranks bring tensors of different sizes, so those are no part of what has to agree
        return self._meet(f"all_to_all in {out.dtype}", run, ((out, full, out_sizes, sizes),), label)

    def all_gather_text(self, text: str) -> list[str]:
        texts: list[str] = []

        def run(all_texts: list[tuple[list[str], str]]) -> None:
            for target, _ in all_texts:
                target.extend(piece for _, piece in all_texts)

        self._meet("all_gather_text", run, (texts, text)).wait()
        return texts

    def _meet(self, kind: str, run: Callable[[list[Any]], None], brought: tuple[Any, ...], label: str = "") -> Work:
        tensors = [x for x in brought if isinstance(x, torch.Tensor)]
        signature = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors) or "text"
        signature += f" of {label}" if label else ""

        def no_grad(items: list[Any]) -> None:
            with torch.no_grad():
                run(items)

        rank = self.members[self.rank]
        meeting = self.world.join(self.members, self.rank, _What(kind, self.axis, signature, no_grad), brought)
        return DeferredWork(lambda: self.world.wait(rank, meeting))
