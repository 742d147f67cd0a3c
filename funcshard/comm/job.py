"""The job of this process: torchrun's environment, torch's default group, and groups for a mesh."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from funcshard._utils.torch_groups import group_timeout
from funcshard.comm.meeting import meet
from funcshard.comm.torch_group import connected, start_job, watch_of_job
from funcshard.comm.watch import Limits, LostError
from funcshard.plan import axes_text, position_of, rank_at


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
        ValueError: torchrun's variables are missing in the environment, or are no numbers.
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
            start_job(connect, store, rank, world, limits)
    except LostError as lost:
        raise RuntimeError(str(lost)) from None
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"rank {rank} of {world} cannot join the job at {master_address}:{master_port} within "
            f"{timeout:g} s: every process has to call init_mesh, and the address of rank 0 must be reachable; "
            "read the logs of the other ranks, and see MASTER_ADDR and MASTER_PORT. Communication "
            f"ended with: {error}"
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
    timeout, call_title = group_timeout(dist.group.WORLD), f"{call} of {axes_text(sizes)} ranks"
    seconds = timeout.total_seconds()
    meet(watch_of_job(), sorted(ranks), call_title, mesh_facts, timeout=seconds, limits=limits)


def device_mesh_of(kind: str, sizes: Mapping[str, int], limits: Limits) -> DeviceMesh:
    """Return the device mesh over all processes."""
    axis_names, shape, world = tuple(sizes), tuple(sizes.values()), dist.get_world_size()
    job_group, backend = dist.group.WORLD, str(dist.get_backend())
    assert job_group is not None, "init_mesh has made the default group"
    # With a device that is bound to the default group, all ranks split its communicator together.
    if backend == "fake" or getattr(job_group, "bound_device_id", None) is not None:
        return init_device_mesh(kind, shape, mesh_dim_names=axis_names)
    if kind == "cuda" and not torch.cuda.is_initialized():
        _choose_gpu(
            _number("LOCAL_RANK", 0)
            if "LOCAL_RANK" in os.environ
            else dist.get_rank() % torch.cuda.device_count()
        )
    # Why not ``init_device_mesh``: its groups have another timeout, half an hour.
    rank_grid = torch.arange(world, device="cpu").view(shape)
    axis_groups = []
    for axis, line_ranks in lines_through(dist.get_rank(), sizes).items():
        axis_group, job_timeout = job_group, group_timeout(job_group)
        if len(line_ranks) < world:
            axis_group = connected(line_ranks, backend, job_timeout, f"mesh axis {axis!r}", limits)
        axis_groups.append(axis_group)
    return DeviceMesh.from_group(axis_groups, kind, mesh=rank_grid, mesh_dim_names=axis_names)


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
    return torch.device(
        "cuda",
        _number("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else torch.cuda.current_device(),
    )


def _choose_gpu(number: int) -> None:
    device_count = torch.cuda.device_count()
    if number >= device_count:
        raise ValueError(
            f"each process of a machine needs a GPU of its own; found process number {number} "
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
        return dist.PrefixStore("default_pg", store)
    return dist.PrefixStore(
        f"attempt {attempt_text}", dist.TCPStore(address, port, is_master=False, timeout=timeout)
    )
