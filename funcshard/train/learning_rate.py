"""Learning rates as functions of the step."""

from __future__ import annotations

import array
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from funcshard._utils.options import check_count, check_number, outline, with_remedies


def torch_schedule(
    make: Callable[..., Any], /, *, lr: float, **options: Any
) -> TorchSchedule:
    """Return a scheduler of ``torch.optim.lr_scheduler`` as a function of the number of steps.

    You get the rates of a scheduler that is stepped once after each step, to the last bit. Pass the
    function as ``lr=``.

    Arguments:
        make: a class of ``torch.optim.lr_scheduler``, or your ``make(optimizer)`` that returns a
            scheduler made of several.
        lr: the learning rate that your scheduler starts from.
        options: arguments of the class (``T_max``, ``gamma`` and so on).

    Returns:
        ``schedule(step)``, the learning rate of the step after ``step`` steps. It keeps the rates,
        8 bytes a step.

    Raises:
        TypeError: ``make`` returned no scheduler of torch, or one that needs the loss of each step,
            as ``ReduceLROnPlateau`` does.
        ValueError: ``lr`` is negative or not finite, or the scheduler changes other options too.

    Example:
        >>> import torch, funcshard as fs
        >>> from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
        >>> schedule = fs.torch_schedule(CosineAnnealingLR, lr=0.1, T_max=2)
        >>> [round(schedule(step), 3) for step in range(3)]
        [0.1, 0.05, 0.0]
        >>> def warm_up_then_cosine(optimizer):
        ...     warm_up = LinearLR(optimizer, start_factor=0.5, total_iters=2)
        ...     cosine = CosineAnnealingLR(optimizer, T_max=2)
        ...     return SequentialLR(optimizer, [warm_up, cosine], milestones=[2])
        >>> schedule = fs.torch_schedule(warm_up_then_cosine, lr=0.1)
        >>> [round(schedule(step), 3) for step in range(5)]
        [0.05, 0.075, 0.1, 0.05, 0.0]
        >>> optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=schedule)

    Source: ``torch.optim.lr_scheduler``.
    """
    check_number("lr", lr, least=0, remedy="pass the rate that the scheduler starts from")
    if not callable(make):
        raise TypeError(
            f"make must be a class of torch.optim.lr_scheduler, or a function; found {outline(make)}"
        )
    return TorchSchedule(make, lr, options)


_REMEDY = "leave it out; the optimizer asks for the rate of each step"


@with_remedies("a schedule of torch_schedule", {"step": _REMEDY})
class TorchSchedule:
    """The function that ``torch_schedule`` returns."""

    def __init__(
        self, make: Callable[..., Any], lr: float, options: Mapping[str, Any]
    ) -> None:
        class_name = getattr(make, "__name__", type(make).__name__)
        self._title = f"torch_schedule({class_name}, lr={lr})"
        # Any class without momentum, which some schedulers would change too.
        self._optimizer = torch.optim.Adagrad(
            [torch.zeros(0, dtype=torch.float32, device="cpu")], lr=float(lr)
        )
        scheduler = make(self._optimizer, **options)
        if not isinstance(scheduler, lr_scheduler.LRScheduler) or isinstance(
            scheduler, lr_scheduler.ReduceLROnPlateau
        ):
            raise TypeError(
                "torch_schedule takes a scheduler of torch.optim.lr_scheduler that depends on the "
                f"step alone; found {type(scheduler).__name__}, which needs a loss or is none: a "
                "function from the step to a rate is a schedule already, so pass it as lr="
            )
        self._scheduler = scheduler
        self._optimizer.step()  # before the first step of the scheduler, which asks for that
        self._rates = array.array("d", [self._now()])
        # Why: simulated ranks are threads, which may share a schedule.
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{self._title}>"

    def __call__(self, step: int) -> float:
        if step >= len(self._rates):
            with self._lock:
                # Schedulers go forward only, so each rate on the way is kept.
                while step >= len(self._rates):
                    self._scheduler.step()
                    self._rates.append(self._now())
        return self._rates[check_count("step", step, 0, of="steps")]

    def _now(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])
