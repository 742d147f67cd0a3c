"""Numbers of a step for a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from funcshard._utils.options import check_count
from funcshard.comm import Mesh
from funcshard.plan import AXES
from funcshard.train.train_state import TrainState


def make_meter(
    mesh: Mesh, *, tokens: int | None = None, step: int = 0
) -> Callable[[TrainState, Mapping[str, Any]], dict[str, float]]:
    """Return a function from the state and the metrics of a step to plain numbers for a log.

    Call it where you log, on one rank or on all, after every step or every tenth. It starts no
    collective, but the host waits for the metrics.

    Arguments:
        mesh: the ranks.
        tokens: number of tokens, or samples, in your rank's batch of one step; ``None`` for no
            ``"tokens_per_second"``.
        step: number of steps taken before the first, such as ``state.step`` of a restored state.

    Returns:
        ``meter(state, metrics)``, a dictionary with these entries:

        - ``"step"``: number of steps taken;
        - every metric of one element, such as ``"loss"``, ``"lr"`` and ``"grad_norm"``;
        - ``"seconds_per_step"``: the mean over the steps since the last call;
        - ``"tokens_per_second"``: of all ranks together. Tokens that ranks along a model axis share
          count once;
        - ``"peak_memory"``: on CUDA, the most bytes that tensors of this process have taken; on the
          CPU, the largest resident memory of this process, if the system counts it.

    Raises:
        TypeError: ``mesh`` isn't a mesh; in ``meter``: ``state`` isn't a ``TrainState``.
        ValueError: ``tokens`` or ``step`` isn't a whole number, or too small.

    Example:
        >>> import torch, funcshard as fs
        >>> meter = fs.make_meter(fs.Mesh(), tokens=512)
        >>> state = fs.TrainState({"": {"float32": torch.ones(3)}}, {}, opt_state={}, step=1)
        >>> values = meter(state, {"loss": torch.tensor(2.5), "lr": 0.1})
        >>> values["step"], values["loss"], values["lr"]
        (1, 2.5, 0.1)
        >>> values["tokens_per_second"] > 0
        True
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"make_meter takes a mesh; found {type(mesh).__name__}: call make_meter(mesh, "
            "tokens=...)"
        )
    if tokens is not None:
        tokens = check_count("tokens", tokens, of="tokens", none="for no count")
    last_step, last_time = check_count("step", step, 0, of="steps"), time.perf_counter()
    num_batches = math.prod(mesh.shape[axis] for axis in AXES)

    def meter(state: TrainState, metrics: Mapping[str, Any]) -> dict[str, float]:
        nonlocal last_step, last_time
        if not isinstance(state, TrainState):
            raise TypeError(
                "a meter takes the state and the metrics that a step returned, in this order; "
                f"found {type(state).__name__}: call meter(*step(state, batch))"
            )
        values: dict[str, float] = {"step": state.step}
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                values[name] = value.item()
            elif isinstance(value, int | float):
                values[name] = value
        current_time = time.perf_counter()
        num_steps, seconds = state.step - last_step, current_time - last_time
        last_step, last_time = state.step, current_time
        if num_steps > 0:  # a skipped step does not count
            values["seconds_per_step"] = seconds / num_steps
            if tokens is not None:
                values["tokens_per_second"] = tokens * num_batches * num_steps / seconds
        peak_memory = _peak_memory(mesh.device)
        if peak_memory is not None:
            values["peak_memory"] = peak_memory
        return values

    return meter


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024  # Linux counts KiB
