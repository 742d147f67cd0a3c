"""States of this process: its random number generators, and its searches for garbage."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils.torch_private import recording_graph

# The state of the CPU's generator, as operations of a graph; ``funcshard.graph`` runs them.
torch.library.define("funcshard::random_state", "() -> Tensor")
torch.library.define("funcshard::set_random_state", "(Tensor state) -> ()")


@torch.library.register_fake("funcshard::random_state")
def _() -> torch.Tensor:
    return torch.empty(torch.get_rng_state().shape, dtype=torch.uint8, device="cpu")


@torch.library.register_fake("funcshard::set_random_state")
def _(state: torch.Tensor) -> None:
    return None


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of torch's random number generators and, on request, of Python's.

    Attributes:
        cuda: state of torch's generator on the current CUDA device; ``None`` before CUDA is used.
        python: state of the module ``random``, if asked for.
    """

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    python: Any = None

    @classmethod
    def take(cls, *, python: bool = False) -> RandomState:
        """Return the current state, with that of the module ``random`` if ``python``."""
        cuda_state = None
        # Why not ask CUDA in any case: asking would create a CUDA context in a process without one.
        if torch.cuda.is_initialized():
            cuda_state = torch.cuda.get_rng_state()
        # A run of a graph takes the state of that moment.
        cpu_state = (
            torch.ops.funcshard.random_state()
            if recording_graph()
            else torch.get_rng_state()
        )
        return cls(cpu_state, cuda_state, random.getstate() if python else None)

    def put(self) -> None:
        """Set the generators to this state."""
        if recording_graph():  # a run of the graph sets the state, and not its recording
            torch.ops.funcshard.set_random_state(self.cpu)
            return
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        if self.python is not None:
            random.setstate(self.python)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run the ``with`` block from this state; set the generators back afterwards."""
        state_before = self.take(python=self.python is not None)
        self.put()
        try:
            yield
        finally:
            state_before.put()


# --- garbage --------------------------------------------------------------------------------------


# Why: threads that look and switch at the same time would leave the searches off.
_lock = threading.Lock()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Run the ``with`` block without searches for garbage in cycles.

    Python has one switch for all threads. The block that found it on turns it on again.
    """
    with _lock:
        was_enabled = gc.isenabled()
        # Why: each search walks through all objects, and the trace of 80,000 modules has
        # a million. Searches would double its time.
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
