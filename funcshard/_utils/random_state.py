"""The random state of this process: take it, and put it back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["RandomState"]


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of torch's random number generators, and of Python's if asked for.

    Attributes:
        cpu: torch's generator on the CPU.
        cuda: torch's generator on the current CUDA device, if CUDA is in use.
        python: the state of the module ``random``, or ``None``.
    """

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    python: Any = None

    @classmethod
    def take(cls, *, python: bool = False) -> RandomState:
        """Return the present state; ``put`` is the inverse."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(torch.get_rng_state(), cuda, random.getstate() if python else None)

    def put(self) -> None:
        """Make this the present state; ``take`` is the inverse."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        if self.python is not None:
            random.setstate(self.python)
