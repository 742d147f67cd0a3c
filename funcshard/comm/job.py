"""The job of this process: torchrun's environment, torch's default group, and groups for a mesh.

torch.distributed makes a process group without a look at the other ranks: one that makes another
mesh than the rest would wait until a timeout. So the ranks of a mesh first ``meet`` in the job's
store. Each writes the facts of its mesh; the first compares all, and writes the answer.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from funcshard._utils.options import some
from funcshard._utils.torch_groups import group_timeout
from funcshard.comm.agreement import first_difference
from funcshard.comm.torch_group import WATCHES, connected, watch_of_job
from funcshard.comm.watch import (
    LIMITS,
    Limits,
    LostError,
    SilentStoreError,
    Wait,
    Watch,
    name_of,
    watched,
    write_text,
)
from funcshard.plan import axes_text, position_of, rank_at

# Seconds between two looks into the store by ranks that meet: the first ones are short, because
# ranks of one program come at about the same time; the last ones spare the one store that all ask.
_SHORTEST, _LONGEST = 0.001, 0.1


def is_started() -> bool:
    """Return whether this process has a default group."""
    return dist.is_available() and dist.is_initialized()


def launched_ranks() -> int | None:
    """Return the number of ranks that torchrun has started, if it has."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    world, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if rank >= world:
        raise ValueError(
            f"the environment variable RANK must be less than WORLD_SIZE, {world}; found {rank}: "
            "start the program with torchrun, or unset both for one rank alone"
        )
    return world


def start(kind: str, world: int, timeout: float, limits: Limits) -> None:
    """Make the default group of a process that torchrun has started.

    Raises:
        ValueError: torchrun's variables are missing in the environment, or aren't numbers.
        RuntimeError: the other ranks have not come in time, or one is lost.
    """
    rank = _number("RANK", 0)
    master_port = _number("MASTER_PORT", 0)
    master_address = os.environ.get("MASTER_ADDR")
    if not master_address:
        raise ValueError(
            "the environment variable MASTER_ADDR must name the machine of rank 0, because RANK "
            "and WORLD_SIZE are set; found none: start the program with torchrun, or unset RANK "
            "and WORLD_SIZE for one rank alone"
        )
    if kind == "cuda" and "LOCAL_RANK" in os.environ:
        _choose_gpu(_number("LOCAL_RANK", 0))
    job_timeout = datetime.timedelta(seconds=timeout)
    try:
        _check_launcher(master_address, master_port, limits.patience)
        # Why a store of our own making: the signs of life begin before torch connects the ranks.
        store = _store_of_job(master_address, master_port, rank, world, job_timeout)
        backend = "nccl" if kind == "cuda" else "gloo"

        def connect() -> None:
            dist.init_process_group(
                backend, store=store, timeout=job_timeout, rank=rank, world_size=world
            )

        if kind == "cuda":  # the current GPU is one of the thread
            connect()
        else:
            watch = Watch(rank, store)
            watched(connect, watch, range(world), limits)
            WATCHES[dist.group.WORLD] = watch
    except LostError as lost:
        raise RuntimeError(str(lost)) from None
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"rank {rank} of {world} cannot join the job at {master_address}:{master_port} within "
            f"{timeout:g} s: every process has to call init_mesh and reach that address. Read the "
            "logs of the other ranks, and see MASTER_ADDR and MASTER_PORT. Communication ended "
            f"with: {error}"
        ) from error


def meet_for_mesh(
    ranks: Sequence[int], sizes: Mapping[str, int], kind: str, call: str, limits: Limits
) -> None:
    """Wait for the ranks of a mesh; raise on all of them unless they are to make the same one.

    Arguments:
        ranks: their global numbers, in the order of the mesh.
        sizes: the size of each axis.
        kind: type of the device.
        call: name of the function that makes the mesh.
        limits: when a rank looks at the others, and gives one up.
    """
    # With torch's stand-in "fake", the other ranks do not exist.
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return
    mesh_facts = {
        "the function that makes the mesh": call,
        "the shape of the mesh": axes_text(sizes),
        "the device of the mesh": kind,
        "the order of the ranks in the mesh": "that of their numbers"
        if [*ranks] == sorted(ranks)
        else str([*ranks]),
    }
    timeout, call_title = (
        group_timeout(dist.group.WORLD),
        f"{call} of {axes_text(sizes)} ranks",
    )
    seconds = timeout.total_seconds()
    meet(
        watch_of_job(),
        sorted(ranks),
        call_title,
        mesh_facts,
        timeout=seconds,
        limits=limits,
    )


def meet(
    watch: Watch,
    ranks: Sequence[int],
    call: str,
    facts: Mapping[str, str],
    *,
    timeout: float,
    limits: Limits = LIMITS,
) -> None:
    """Return once all ranks have called this with equal ``facts``.

    Arguments:
        watch: that of this process.
        ranks: the global ranks that meet; each has to call this with the same ranks.
        call: the action that they are about to begin, for errors.
        facts: texts by name, which are compared in this order.
        timeout: seconds after which a rank that has not come is an error.
        limits: when this rank looks at the others, and gives one up.

    Raises:
        ValueError: the facts of two ranks differ, on every rank.
        RuntimeError: a rank has not come in time, ranks wait for each other elsewhere, or the store
            of the job cannot be reached.
    """
    group_name, own_rank, first_rank = name_of("meeting", ranks), watch.rank, ranks[0]
    number, is_told = watch.count(group_name), False

    def key(whose: object, before: int = 0) -> str:
        return f"funcshard/{group_name}/{number - before}/{whose}"

    def answer(store: Any) -> str | None:
        """Write this rank's facts, and return the answer; ``None`` if ranks have not come yet."""
        nonlocal is_told
        # Why remembered: this runs at each look, and one text is enough.
        if not is_told:
            write_text(store, key(own_rank), json.dumps(dict(facts)))
            is_told = True
        # The first rank finds its answer here too if that came too late.
        if store.check([key("answer")]):
            return str(store.get(key("answer")).decode())
        fact_keys = [*map(key, ranks)]
        # Why the first rank alone: each of a thousand would read a thousand texts.
        if own_rank != first_rank or not store.check(fact_keys):
            return None
        difference = first_difference(
            [json.loads(store.get(key)) for key in fact_keys], ranks
        )
        write_text(store, key("answer"), difference)
        return difference

    def is_away(rank: int) -> bool:
        """Return whether a rank has not come, or not told what it found out."""
        return not watch.check([key(rank), *[key("answer")] * (rank == first_rank)])

    def look() -> None:
        """Raise ``LostError`` if this rank waits in vain."""
        call_title = f"{call}, number {number} of these ranks"
        wait = Wait(
            group_name, number, call_title, [rank for rank in ranks if rank != own_rank]
        )
        if why := watch.why(wait, limits.give_up, is_away=is_away):
            # Why: this rank raises, so ranks that wait for it in collectives must fail too.
            watch.close_connections()
            raise LostError(why)

    def raise_late() -> None:
        missing_ranks = list[int]()
        with contextlib.suppress(SilentStoreError):
            missing_ranks += [rank for rank in ranks if not watch.check([key(rank)])]
        raise LostError(
            f"rank {own_rank} waited {timeout:g} s in {call}, which is number {number} of these "
            f"ranks, and rank {some(missing_ranks) or first_rank} has not come: every rank has to "
            "make the same meshes in the same order. Read its log, or pass a larger timeout"
        )

    def forget_previous(store: Any) -> None:
        for whose in (
            (own_rank, "answer")[: 1 + (own_rank == first_rank)] if number > 1 else ()
        ):
            store.delete_key(key(whose, before=1))

    # Why no wait of the store: that of a file asks once a second.
    begin_time = current_time = time.monotonic()
    next_look, sleep_seconds, difference = begin_time + limits.patience, _SHORTEST, None
    try:
        while True:
            # Why suppressed: the store may answer later, and a look says if it does not.
            with contextlib.suppress(SilentStoreError):
                difference = watch.ask(answer)
                if difference is not None:
                    break
            if current_time >= begin_time + timeout:
                raise_late()
            if current_time >= next_look:
                look()
                # Why soon: a circle of ranks counts once a second look finds it again.
                next_look = current_time + limits.patience / 8
            # Ranks of one program come soon, and others spare the store.
            time.sleep(sleep_seconds)
            sleep_seconds, current_time = (
                min(1.5 * sleep_seconds, _LONGEST),
                time.monotonic(),
            )
        # All ranks have come here, so all have read the answer of the meeting before.
        with contextlib.suppress(RuntimeError):
            watch.ask(forget_previous)
    except LostError as late:
        raise RuntimeError(str(late)) from None
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {own_rank} cannot reach the store of the job in {call}: the process that holds "
            "it, rank 0 or the launcher, has ended; read its log first. Communication ended with: "
            f"{error}"
        ) from error
    if difference:
        raise ValueError(difference)


def device_mesh_of(kind: str, sizes: Mapping[str, int], limits: Limits) -> DeviceMesh:
    """Return the device mesh over all processes."""
    axis_names, shape, world = tuple(sizes), tuple(sizes.values()), dist.get_world_size()
    job_group, backend = dist.group.WORLD, str(dist.get_backend())
    assert job_group is not None, "init_mesh has made the default group"
    # With a device that is bound to the default group, all ranks split its communicator together.
    if backend == "fake" or getattr(job_group, "bound_device_id", None) is not None:
        return init_device_mesh(kind, shape, mesh_dim_names=axis_names)
    # Why not after its first use of CUDA: its tensors are on the GPU that it chose.
    if kind == "cuda" and not torch.cuda.is_initialized():
        _choose_gpu(_local_rank(lambda: dist.get_rank() % torch.cuda.device_count()))
    # Why not ``init_device_mesh``: its groups have another timeout, half an hour.
    rank_grid = torch.arange(world, device="cpu").view(shape)
    axis_groups = []
    for axis, line_ranks in lines_through(dist.get_rank(), sizes).items():
        axis_group, job_timeout = job_group, group_timeout(job_group)
        # Note: an axis of all ranks has the default group, which lives as long as the job.
        if len(line_ranks) < world:
            axis_group = connected(
                line_ranks, backend, job_timeout, f"mesh axis {axis!r}", limits
            )
        axis_groups.append(axis_group)
    return DeviceMesh.from_group(
        axis_groups, kind, mesh=rank_grid, mesh_dim_names=axis_names
    )


def lines_through(rank: int, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the numbers of the ranks along each axis of a grid, on the line through ``rank``."""
    position = position_of(rank, sizes)
    return {
        axis: [rank_at({**position, axis: i}, sizes) for i in range(size)]
        for axis, size in sizes.items()
    }


def check_gpu(kind: str) -> None:
    """Raise ``ValueError`` if the job needs GPUs, and torch finds none."""
    if (
        kind == "cuda"
        and torch.cuda.device_count() == 0
        and not (is_started() and dist.get_backend() == "fake")
    ):
        raise ValueError(
            "device='cuda' needs a GPU, and torch finds none here: see nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, install a torch that is built for CUDA, or pass "
            "init_mesh(device='cpu')"
        )


def device_of(kind: str) -> torch.device:
    """Return the device of this process; of GPUs that of its number on the machine."""
    if kind != "cuda":
        return torch.device(kind)
    return torch.device("cuda", _local_rank(torch.cuda.current_device))


def _local_rank(default: Callable[[], int]) -> int:
    return _number("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else default()


def _choose_gpu(number: int) -> None:
    device_count = torch.cuda.device_count()
    if number >= device_count:
        raise ValueError(
            f"each process of a machine needs its own GPU; found process number {number} "
            f"(LOCAL_RANK) and {device_count} GPUs: start torchrun with "
            f"--nproc-per-node={device_count}, or pass init_mesh(device='cpu')"
        )
    torch.cuda.set_device(number)


def _number(name: str, least: int) -> int:
    variable_text = os.environ.get(name, "")
    if not variable_text.isdecimal() or int(variable_text) < least:
        raise ValueError(
            f"the environment variable {name} must be a whole number of at least {least}, as "
            f"torchrun sets it; found {variable_text!r}: start the program with torchrun, or unset "
            "RANK and WORLD_SIZE for one rank alone"
        )
    return int(variable_text)


def _check_launcher(address: str, port: int, patience: float) -> None:
    """Raise ``ConnectionRefusedError`` if torchrun, whose agent holds the store, has ended."""
    # Why: torch tries until its timeout to reach a store. But an agent has its store before it
    # starts ranks, so a store that refuses connections has ended with its agent.
    end_time = time.monotonic() + patience
    while os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((address, port), timeout=patience).close()
        except ConnectionRefusedError as error:
            # It may not listen yet, or have ended just now.
            if time.monotonic() > end_time:
                raise ConnectionRefusedError(
                    f"{error}: torchrun, which holds the store of the job, has ended"
                ) from None
            time.sleep(0.05)
            continue
        except OSError:  # such as a name that has no address yet
            pass
        return


def _store_of_job(
    address: str, port: int, rank: int, world: int, timeout: datetime.timedelta
) -> dist.Store:
    # Why a prefix: torchrun keeps one store for all attempts, in which torch would find the
    # addresses of the previous attempt's ranks. On a single node every rank has the same number of
    # the attempt, which serves as the prefix. On several nodes the numbers may differ.
    attempt_text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    local_size = os.environ.get("LOCAL_WORLD_SIZE")
    if (
        attempt_text == "0"
        or local_size != os.environ["WORLD_SIZE"]
        or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    ):
        store, *_ = next(dist.rendezvous("env://", rank, world, timeout=timeout))
        store.set_timeout(timeout)
        # Note: torch does so with a store of its making, but not with this one.
        return dist.PrefixStore("default_pg", store)
    return dist.PrefixStore(
        f"attempt {attempt_text}",
        dist.TCPStore(address, port, is_master=False, timeout=timeout),
    )
