"""``simulate``: run the same code as N ranks inside one process.

Each rank is a thread, and one rank runs at a time, until it waits for a collective that another
rank has not joined. Then the next rank that can continue runs, so the order is the same in every
run, and a deadlock is seen at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from funcshard._utils.options import check_count, check_device, check_flag
from funcshard._utils.process_state import RandomState
from funcshard._utils.tensors import dtype_name
from funcshard._utils.torch_private import one_forward_level, transforms_active
from funcshard.comm.attempts import AGREEMENT
from funcshard.comm.group import (
    DONE,
    DeferredWork,
    Group,
    LocalGroup,
    Op,
    Work,
    concatenate,
    exchange_part,
    sum_in_rank_order,
)
from funcshard.comm.job import lines_through
from funcshard.comm.mesh import SIMULATED, Mesh
from funcshard.comm.varying import Reports, VaryingCheck
from funcshard.comm.watch import SAME_ORDER
from funcshard.plan import mesh_axes_of

Result = TypeVar("Result")

_MOST_RANKS = 10_000  # that are threads of one process


def simulate(
    fn: Callable[[Mesh], Result],
    world_size: int | Mapping[str, int],
    *,
    device: str | torch.device = "cpu",
    threads: int | None = 1,
    check_vma: bool = False,
) -> list[Result]:
    """Run ``fn(mesh)`` as N ranks inside this process, and return each rank's result.

    A simulation is deterministic, so you can try sharded code in a notebook, test and debug it. The
    same ``fn`` runs unchanged under torchrun, with the mesh of ``fs.init_mesh``.

    - Numbers: you get the bits of gloo processes that compute on the same number of threads.
    - Random numbers: each rank starts from a copy of your random state, which does not change.
    - Errors: if a rank raises, all ranks end and you get the error. A deadlock is an error at once,
      and so are ranks that issue different collectives.
    - Shared state: the ranks share all else of the process, such as environment, default dtype and
      files, and torch's single level of forward-mode differentiation: you can call
      ``torch.func.jvp``, but not open ``torch.autograd.forward_ad.dual_level``.

    Arguments:
        fn: your program of one rank, called with that rank's mesh.
        world_size: number of ranks, or the shape of the mesh, such as
            ``{"replicate": R, "shard": S, "tensor": T}``; see ``init_mesh``.
        device: device of every rank.
        threads: number of threads for the computation of each rank. ``None`` keeps
            ``torch.get_num_threads()``, which is slow, because idle threads keep the processors
            busy.
        check_vma: whether to compare the ranks before each backward, which takes several times
            as long. See docs/same-on-every-mesh.md.

    Returns:
        The results, in order of ranks.

    Raises:
        Exception: the error of the first rank that failed, with a note that names the rank.
        RuntimeError: the ranks are in a deadlock, or issue different collectives; you call
            ``simulate`` inside a transform of ``torch.func``, or use the mesh of another rank or
            simulation.
        TypeError: ``fn`` isn't a function, or ``threads`` isn't a number.
        ValueError: ``world_size`` is neither a positive number nor a shape, or ``threads`` is not
            positive.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.simulate(lambda mesh: fs.psum(torch.tensor(mesh.rank), mesh).item(), world_size=4)
        [6, 6, 6, 6]
        >>> fs.simulate(
        ...     lambda mesh: (mesh.replicate.rank, mesh.shard.rank), {"replicate": 2, "shard": 2}
        ... )
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    if not callable(fn) or isinstance(fn, torch.nn.Module):
        raise TypeError(
            f"simulate takes the program of one rank, fn(mesh), before world_size; found {fn!r}"
        )
    axis_sizes = mesh_axes_of(world_size, "world_size")
    if (ranks := math.prod(axis_sizes.values())) > _MOST_RANKS:
        raise ValueError(
            f"world_size must be at most {_MOST_RANKS:,} ranks, because each is a thread of this "
            f"process; found {ranks:,}: pass fewer ranks"
        )
    if threads is not None:
        threads = check_count(
            "threads", threads, of="threads", none="for torch's own number", remedy="pass 1"
        )
    if transforms_active():
        raise RuntimeError(
            "simulate was called inside a torch.func transform; its ranks are threads, which the "
            "transform does not reach, so derivatives would be lost: call the transform inside "
            "the function that is simulated"
        )
    check_flag("check_vma", check_vma)
    device = check_device(device)
    world = _World(ranks)
    results: list[Any] = [None] * world.size
    reports: Reports = {}

    def mesh_of(rank: int) -> Mesh:
        groups: dict[str, Group] = {
            axis: _SimulatedGroup(world, tuple(line_ranks), line_ranks.index(rank), axis)
            if len(line_ranks) > 1
            else LocalGroup()
            for axis, line_ranks in lines_through(rank, axis_sizes).items()
        }
        return Mesh(groups, device)

    def run(rank: int) -> None:
        # Why: torch's grad mode belongs to a thread, and a new thread begins with it on.
        torch.set_grad_enabled(grad_enabled)
        try:
            world.take_turn(rank)
            mesh = mesh_of(rank)
            # Why single-threaded: autograd has one thread for a GPU, which all ranks share. A
            # backward that waited there for another rank would keep that rank's backward out.
            check = VaryingCheck(mesh, reports) if check_vma else contextlib.nullcontext()
            with torch.autograd.set_multithreading_enabled(False), check:
                SIMULATED.set(mesh)
                _running.set((world, rank))
                results[rank] = fn(mesh)
        except _EndedError:
            pass
        except BaseException as error:
            world.fail(rank, error)
        finally:
            world.leave(rank)

    grad_enabled, random_before = torch.is_grad_enabled(), RandomState.take(python=True)
    rank_threads = [
        threading.Thread(
            # The rank sees what the caller has set, such as a recording of events.
            target=contextvars.copy_context().run,
            args=(run, rank),
            name=f"rank {rank}",
            # Why: after Ctrl-C, a rank without collectives must not keep the process.
            daemon=True,
        )
        for rank in range(world.size)
    ]
    threads_before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        # Why not for one rank: it has the level alone, and torch.func.linearize opens it itself.
        with one_forward_level() if world.size > 1 else contextlib.nullcontext():
            for rank_thread in rank_threads:
                rank_thread.start()
            for rank_thread in rank_threads:
                rank_thread.join()
    except BaseException as error:  # such as Ctrl-C: the ranks end at their next collective
        world.fail(None, error)
        raise
    finally:
        torch.set_num_threads(threads_before)
        random_before.put()
    if world.failure is not None:
        raise world.failure
    return results


# The simulation and the rank that run in this context.
_running: contextvars.ContextVar[tuple[_World, int] | None] = contextvars.ContextVar(
    "funcshard_running", default=None
)


# Why no ``Exception``: no handler in the rank's own code may catch it.
class _EndedError(BaseException):
    """Ends a rank after another rank has failed."""


class _World:
    """The scheduler of the ranks, and the collectives that some ranks have joined and others not.

    A ``rank`` is a number in the whole simulation, a ``position`` one in a group.

    Attributes:
        size: number of ranks.
        failure: the error of the first rank that failed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: BaseException | None = None
        # those of ranks that don't run are locked
        self._gates = [threading.Lock() for _ in range(size)]
        for gate in self._gates[1:]:
            gate.acquire()
        self._left: set[int] = set()  # the ranks that have returned or failed
        # what each waiting rank waits for
        self._waits: dict[int, _Collective] = {}
        self._random = [RandomState.take(python=True) for _ in range(size)]
        # how many collectives each rank has joined, by the ranks of the group and its position
        # there
        self._counts: dict[tuple[tuple[int, ...], int], int] = {}
        self.attempts: dict[int, _Attempt] = {}  # those that ranks run
        self.broken = False  # whether a rank has failed inside a collective
        # collectives that some ranks have not joined, by the ranks of the group and the number
        self._open: dict[tuple[tuple[int, ...], int], _Collective] = {}

    def take_turn(self, rank: int) -> None:
        """Wait for the turn of ``rank``, then put its random state in place."""
        self._gates[rank].acquire()
        if self.failure is not None:
            raise _EndedError
        self._random[rank].put()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Make ``error`` the failure of the simulation, unless there is one."""
        if self.failure is None:
            if isinstance(error, RuntimeError) and "Nested forward mode AD" in str(error):
                error.add_note(
                    "torch has one level of forward-mode differentiation, which the simulated "
                    "ranks share: call torch.func.jvp for each tangent in place of "
                    "torch.func.linearize or torch.autograd.forward_ad"
                )
            if rank is not None:
                error.add_note(f"raised on rank {rank} of {self.size} simulated ranks")
            self.failure = error

    def leave(self, rank: int) -> None:
        """Pass the turn on for the last time."""
        self._left.add(rank)
        self._pass_turn(rank)

    def join(self, position: int, joined: _Collective) -> _Collective:
        """Join the next collective of a group, and return it; the last rank to join runs it.

        Arguments:
            position: of the joining rank in the group.
            joined: the collective as the rank issues it; the first one is that of all ranks.

        Raises:
            RuntimeError: another rank has issued something else, or this context may not use the
                mesh of the rank.
        """
        ranks, rank, number = joined.ranks, joined.ranks[position], 0
        # Nothing in a thread that the rank started.
        world, user = _running.get() or (self, rank)
        # Why: a rank that waited for a turn of another rank or simulation would wait for ever.
        if rank in self._left or world is not self or user != rank:
            misuse_text = f"the simulation of rank {rank} has ended"
            if rank not in self._left:
                user_text = f"by rank {user}" if world is self else "in another simulation"
                misuse_text = f"it is used {user_text}"
            raise RuntimeError(
                "a simulated mesh belongs to one rank of one simulation; found the mesh of rank "
                f"{rank}, and {misuse_text}: use the mesh that simulate passes to the function, and "
                "what that function made with it"
            )
        # Why not counted: a rank that has failed comes there before all others.
        if joined.arguments[position].label != AGREEMENT:
            number = self._counts[ranks, position] = (
                self._counts.get((ranks, position), 0) + 1
            )
        collective = self._open.setdefault((ranks, number), joined)
        # Why until the end: other ranks wait in a collective that raises.
        self.broken = True
        if collective.form != joined.form:
            first_position = next(iter(collective.arguments))
            (low, low_title), (high, high_title) = sorted(
                [(ranks[first_position], collective.title), (ranks[position], joined.title)]
            )
            raise RuntimeError(
                f"ranks issue different collectives: number {number} on mesh axis {joined.axis!r} "
                f"is {low_title} on rank {low} and {high_title} on rank {high}; {SAME_ORDER}"
            )
        collective.number = number
        collective.arguments |= joined.arguments
        self._run_if_complete(collective)
        self.broken = False
        return collective

    def _run_if_complete(self, collective: _Collective) -> None:
        """Run a collective that all ranks have joined, except for those that have failed."""
        ranks, parts, number = collective.ranks, collective.arguments, collective.number
        missing = [position for position in range(len(ranks)) if position not in parts]
        is_in_attempt = number and all(rank in self.attempts for rank in ranks)
        if missing and not (
            is_in_attempt and all(self.attempts[ranks[i]].failed for i in missing)
        ):
            return
        parts |= {position: _zero_part(position, parts) for position in missing}
        self._counts |= {(ranks, position): number for position in missing}
        del self._open[ranks, number]
        # The last rank to join runs it for all: the others wait, so nothing is computed twice.
        with torch.no_grad():
            collective.texts = _run([parts[position] for position in range(len(ranks))])
        collective.done = True
        # The tensors of ranks that are done must not stay alive.
        parts.clear()

    def fail_attempt(self, rank: int) -> None:
        """Let a rank take part in all collectives of its attempt that others issue, with zeros."""
        self.attempts[rank].failed = True
        # Why a copy: a collective that runs takes itself out of the dictionary.
        for collective in [*self._open.values()]:
            if rank in collective.ranks:
                self._run_if_complete(collective)

    def wait(self, rank: int, collective: _Collective) -> list[str] | None:
        """Let the other ranks run until ``collective`` is done; return its texts, if any."""
        if self.failure is not None:
            raise _EndedError
        if not collective.done:
            # The next rank continues with its own generators.
            self._random[rank] = RandomState.take(python=True)
            self._waits[rank] = collective
            self._pass_turn(rank)
            self.take_turn(rank)
        # Why a copy: every rank gets these texts, and may change its list.
        return collective.texts and [*collective.texts]

    def _pass_turn(self, rank: int) -> None:
        """Give the turn to the next rank after ``rank`` that can continue; fail if none can."""
        # Note: the order is the same in every run, as it depends on the program alone.
        turn_order = [*range(rank + 1, self.size), *range(rank + 1)]
        present_ranks = [
            next_rank for next_rank in turn_order if next_rank not in self._left
        ]
        for next_rank in present_ranks:
            collective = self._waits.get(next_rank)
            # Note: after a failure each rank gets one more turn, and raises in it.
            if collective is None or collective.done or self.failure is not None:
                break
        else:
            if not present_ranks:
                return
            self.fail(None, RuntimeError(self._deadlock()))
            next_rank = present_ranks[0]
        self._waits.pop(next_rank, None)
        self._gates[next_rank].release()

    def _deadlock(self) -> str:
        rank_lines = [
            f"rank {other_rank} has returned"
            if other_rank in self._left
            else f"rank {other_rank} waits in {self._waits[other_rank].describe()}"
            for other_rank in range(self.size)
        ]
        return (
            f"simulated ranks wait for each other and none can continue: {'; '.join(rank_lines)}; every "
            "rank has to call the same functions in the same order, even if one rank alone uses a "
            "result"
        )


@dataclass(slots=True)
class _Collective:
    """A collective that at least one rank has joined.

    Attributes:
        form: its kind, dtypes and shapes of the tensors, and the label.
        axis: name of the mesh axis.
        ranks: the ranks of the group.
        arguments: those of each rank that has joined, by position.
        number: of the collective, in the group; 0 at the end of an attempt.
        done: whether it has run.
        texts: those of all ranks, if it gathers texts.
    """

    form: tuple[str, list[Any], str]
    axis: str
    ranks: tuple[int, ...]
    arguments: dict[int, Op]
    number: int = 0
    done: bool = False
    texts: list[str] | None = None

    @property
    def title(self) -> str:
        """Its form as text, for errors."""
        kind, data_forms, label = self.form
        data_text = ", ".join(f"{dtype_name(dtype)}{shape}" for dtype, shape in data_forms)
        return " of ".join([kind, data_text, *[label] * bool(label)])

    def describe(self) -> str:
        joined_text = ", ".join(
            str(self.ranks[position]) for position in sorted(self.arguments)
        )
        return (
            f"{self.title} (number {self.number} on mesh axis {self.axis!r}), which ranks "
            f"{joined_text} have joined"
        )


@dataclass(frozen=True, slots=True)
class _SimulatedGroup(Group):
    """A group of simulated ranks.

    Attributes:
        world: the simulation.
        ranks: the ranks of the group.
        rank: position of this rank in the group.
        axis: name of the mesh axis.
    """

    world: _World
    ranks: tuple[int, ...]
    rank: int
    axis: str
    size: int = field(init=False)
    global_rank: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))
        object.__setattr__(self, "global_rank", self.ranks[self.rank])

    def open_attempt(self, ranks: Sequence[int]) -> _Attempt:
        """Begin an attempt of some ranks of the simulation."""
        attempt = _Attempt(self.world, self.global_rank)
        self.world.attempts[self.global_rank] = attempt
        return attempt

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        position = global_ranks.index(self.global_rank)
        return _SimulatedGroup(self.world, tuple(global_ranks), position, axis)

    def start(self, op: Op) -> Work:
        # Why asked first: without attempts, a step makes no further call for them.
        if self.world.attempts and (attempt := self.world.attempts.get(self.global_rank)):
            attempt.position += 1
        title = op.kind
        # A rank's part may be empty here, and it takes part all the same.
        if op.kind == "all_gather_text":
            data_forms: list[Any] = [("text", "")]
        elif op.kind == "all_to_all":  # its shapes differ between ranks
            data_forms = [(op.out.dtype, "")]
        elif not op.out.numel():
            return DONE
        else:
            if op.kind == "reduce_scatter":
                op = op._replace(data=concatenate(op.data).to(op.out.dtype))
            elif op.kind == "broadcast":
                title = f"broadcast from rank {op.src}"
            tensors = (op.out, op.data)
            data_forms = [(x.dtype, list(x.shape)) for x in tensors if x is not None]
        joined = _Collective(
            (title, data_forms, op.label), self.axis, self.ranks, {self.rank: op}
        )
        collective = self.world.join(self.rank, joined)
        return DeferredWork(
            functools.partial(self.world.wait, self.global_rank, collective)
        )


@dataclass(slots=True)
class _Attempt:
    """The part of a rank in an attempt: what ``AttemptLog`` is for a process.

    Attributes:
        world, rank: the simulation, and the rank.
        position: how many collectives the rank has issued.
        failed: whether it has failed. Others then go on as if it joined their collectives.
    """

    world: _World
    rank: int
    position: int = 0
    failed: bool = False

    def check_usable(self, error: Exception) -> None:
        if self.world.broken:
            raise error

    def join_rest(self) -> None:
        self.world.fail_attempt(self.rank)

    def close(self) -> None:
        del self.world.attempts[self.rank]

    def forget(self) -> None:
        pass  # nothing remains


def _zero_part(position: int, parts: Mapping[int, Op]) -> Op:
    """Return the part of a rank that has failed in a collective that the others have joined."""
    op = next(iter(parts.values()))
    if op.kind == "all_to_all":
        return exchange_part(position, parts)
    # Why a text stays: a text of its own would be a difference.
    out, data = (
        torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for x in (op.out, op.data)
    )
    return op._replace(out=out, data=data)


def _run(ops: Sequence[Op]) -> list[str] | None:
    """Write the result of a collective on every rank, from the parts of all; return texts."""
    kind, sources = ops[0].kind, [op.out if op.data is None else op.data for op in ops]
    if kind == "all_gather_text":
        return sources
    result = ops[0].out if kind == "all_gather" else sources[ops[0].src]
    if kind == "all_gather":
        # Why not cat: it would hold the whole result once more.
        for part, source in zip(result.chunk(len(ops)), sources, strict=True):
            part.copy_(source)
    elif kind == "all_reduce":
        result = torch.empty_like(sources[0])
        sum_in_rank_order(result, sources)
    chunks = (
        [source.chunk(len(ops)) for source in sources] if kind == "reduce_scatter" else []
    )
    for rank, op in enumerate(ops):
        if kind == "reduce_scatter":
            sum_in_rank_order(op.out, [parts[rank].view_as(op.out) for parts in chunks])
        elif kind == "all_to_all":
            op.out.copy_(
                torch.cat([part.data.split(list(part.sizes))[rank] for part in ops])
            )
        elif op.out is not result:
            op.out.copy_(result)
    return None
