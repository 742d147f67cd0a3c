"""What a trained model is worth: its loss on held-out bytes, and a sample of what it writes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import funcshard as fs
from funcshard.demo.corpus import windows
from funcshard.demo.display import Show

__all__ = ["Model", "loss_of", "passes", "sample", "validation_loss"]

Model = Callable[[torch.Tensor], torch.Tensor]  # bytes to logits; all ranks have to call it together

WINDOWS = 64  # of held-out text, over all ranks


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def passes(mesh: fs.Mesh, size: int) -> int:
    """Return how many batches of ``size`` windows each rank runs in ``validation_loss``."""
    return -(-WINDOWS // (size * mesh.world_size))


@torch.no_grad()
def validation_loss(model: Model, data: torch.Tensor, mesh: fs.Mesh, *, size: int, context: int, show: Show) -> float:
    """Return the mean loss over windows of held-out bytes, the same on every rank, whatever their number.

    Arguments:
        model: bytes to logits.
        data: held-out bytes.
        mesh: the ranks, which share the windows among them.
        size: windows a batch.
        context: bytes a window.
        show: is told how many batches are done.
    """
    inputs, targets = windows(data, count=WINDOWS, context=context)
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for number in range(passes(mesh, size)):
        # Every rank runs as many batches as the others, because each is a collective; what is too much weighs nothing
        mine = torch.arange(number * size, (number + 1) * size) * mesh.world_size + mesh.rank
        weight = (mine < len(inputs)).to(mesh.device)
        mine = mine.clamp(max=len(inputs) - 1)
        logits = model(inputs[mine].to(mesh.device))
        losses = F.cross_entropy(logits.transpose(1, 2), targets[mine].to(mesh.device), reduction="none").mean(1)
        total += torch.stack([(losses * weight).sum(), weight.sum()])
        show(number + 1, "")
    loss, count = fs.psum(total, mesh).tolist()
    return loss / count


@torch.no_grad()
def sample(
    model: Model, mesh: fs.Mesh, *, length: int, context: int, seed: int, show: Show, temperature: float = 0.8
) -> str:
    """Let the model write ``length`` bytes after a line break; all ranks take part alike.

    Arguments:
        model: bytes to logits.
        mesh: the ranks.
        length: number of bytes.
        context: most bytes that the model sees.
        seed: of the draws.
        show: is told how many bytes are written.
        temperature: divides the logits; the lower, the more careful.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(b"\n")
    for number in range(length):
        logits = model(torch.tensor([written[-context:]], device=mesh.device))[0, -1]
        chances = (logits.float().cpu() / temperature).softmax(0)
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
        show(number + 1, "")
    return _printable(bytes(written[1:]))


def _printable(data: bytes) -> str:
    text = data.decode(errors="replace").replace("\ufffd", "·").expandtabs(4)
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
