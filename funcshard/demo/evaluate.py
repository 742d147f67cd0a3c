"""Evaluate a trained model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import funcshard as fs
from funcshard.demo.corpus import windows
from funcshard.demo.display import Show

Model = Callable[[torch.Tensor], torch.Tensor]  # bytes to logits; all ranks must call it together

WINDOWS = 64  # number of windows of held-out text, over all ranks


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def passes(mesh: fs.Mesh, size: int) -> int:
    """Return the batches that each rank runs in ``validation_loss``."""
    return -(-WINDOWS // (size * mesh.world_size))


@torch.no_grad()
def validation_loss(
    model: Model, data: torch.Tensor, mesh: fs.Mesh, *, size: int, context: int, show: Show
) -> float:
    """Return the mean loss over windows of held-out bytes, the same on any number of ranks.

    Arguments:
        size: windows a batch.
        context: bytes a window.
    """
    inputs, targets = windows(data, count=WINDOWS, context=context)
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for pass_index in range(passes(mesh, size)):
        # Why weights: every forward contains collectives, so all ranks run the same number of
        # batches. A rank that has no window left repeats the last one with weight zero.
        first = pass_index * size
        window_indices = (
            torch.arange(first, first + size, device="cpu") * mesh.world_size + mesh.rank
        )
        weights = (window_indices < len(inputs)).to(mesh.device)
        window_indices = window_indices.clamp(max=len(inputs) - 1)
        logits = model(inputs[window_indices].to(mesh.device)).transpose(1, 2)
        byte_losses = F.cross_entropy(
            logits, targets[window_indices].to(mesh.device), reduction="none"
        )
        totals += torch.stack([(byte_losses.mean(1) * weights).sum(), weights.sum()])
        show(pass_index + 1, "")
    # Sums and counts are added up, since ranks may have different numbers of windows.
    loss, count = fs.psum(totals, mesh).tolist()
    return loss / count


@torch.no_grad()
def sample(
    model: Model,
    mesh: fs.Mesh,
    *,
    length: int,
    context: int,
    seed: int,
    show: Show,
    temperature: float = 0.8,
) -> str:
    """Let the model write ``length`` bytes after a line break, the same on every rank.

    Arguments:
        context: the most bytes that the model sees.
        temperature: divisor of the logits; a lower one makes likely bytes likelier.
    """
    # One seed for all ranks, which call the model together and need the same bytes.
    generator = torch.Generator().manual_seed(seed)
    # The model has to see something, and a line begins after a break.
    written_bytes = list(b"\n")
    for sample_index in range(length):
        logits = model(torch.tensor([written_bytes[-context:]], device=mesh.device))[0, -1]
        next_probabilities = (logits.float().cpu() / temperature).softmax(0)
        written_bytes.append(int(torch.multinomial(next_probabilities, 1, generator=generator)))
        show(sample_index + 1, "")
    text = bytes(written_bytes[1:]).decode(errors="replace").replace("\ufffd", "·").expandtabs(4)
    # A terminal would obey control characters.
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
