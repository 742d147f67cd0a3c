"""The models of the cases, and how each side shards them. Libraries are imported when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from benchmarks.life.case import Place

__all__ = ["adamw", "adamw_by_fsdp2", "adamw_by_funcshard", "build", "by_fsdp2", "reset", "sample", "sizes"]

_SIZES = {  # parameters in millions -> width, blocks, vocabulary; the head is tied to the embedding
    98: (768, 12, 16384),
    51: (640, 9, 10240),
    11: (384, 6, 256),
}
_TINY = (16, 2, 32)
_CONTEXT = 128


def sizes(millions: int, place: Place) -> dict[str, int]:
    """Return the sizes of a GPT with a number of parameters, or those of a tiny one."""
    width, layers, vocabulary = _TINY if place.tiny else _SIZES[millions]
    context = 8 if place.tiny else _CONTEXT
    return {
        "width": width,
        "layers": layers,
        "heads": width // (8 if place.tiny else 64),
        "vocabulary": vocabulary,
        "context": context,
    }


def build(millions: int, place: Place, device: str = "cpu") -> nn.Module:
    """Build a GPT on a device, with the same parameters every time."""
    from funcshard.demo.gpt import GPT, GPTConfig

    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        return GPT(GPTConfig(**sizes(millions, place)))


def reset(module: nn.Module) -> None:
    """Write a module's own parameters, as GPT-2 does for layers off the residual stream."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def sample(millions: int, place: Place, batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of one batch of this rank, and the next tokens."""
    g = torch.Generator().manual_seed(1000 + place.rank)
    size = sizes(millions, place)
    tokens = torch.randint(size["vocabulary"], (batch, size["context"] + 1), generator=g)
    return tokens[:, :-1], tokens[:, 1:]


def by_fsdp2(module: nn.Module, size: int, **options: Any) -> Any:
    """Apply FSDP2 to every block and to the root, as its documentation does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused AdamW of a module's parameters."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def adamw_by_fsdp2(millions: int, place: Place) -> tuple[Any, torch.optim.Optimizer]:
    """Return a GPT that FSDP2 shards, and its AdamW after a step with gradients of one."""
    module = by_fsdp2(build(millions, place), place.size)
    optimizer = adamw(module)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


class Sharded(NamedTuple):
    """A model that funcshard shards, and its AdamW."""

    mesh: Any
    apply: Any
    plan: Any
    buffers: Any
    optimizer: Any
    shards: Any
    opt_state: Any


def adamw_by_funcshard(millions: int, place: Place) -> Sharded:
    """Return a GPT that funcshard shards, and its AdamW after a step with gradients of one."""
    import funcshard as fs

    mesh = fs.init_mesh(device="cpu")
    apply, params, buffers = fs.make_functional(build(millions, place))
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
    shards = fs.shard(params, plan, mesh)
    grads = {unit: {key: torch.ones_like(flat) for key, flat in own.items()} for unit, own in shards.items()}
    shards, opt_state = optimizer.step(grads, optimizer.init(shards), shards)
    return Sharded(mesh, apply, plan, buffers, optimizer, shards, opt_state)
