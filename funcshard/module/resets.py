"""Blank tensors, and which of them a reset wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from funcshard._utils.torch_private import version
from funcshard.core import LeafChecksums
from funcshard.module.copying import NamedTensors, Tensors

Reset = Callable[[nn.Module], object]


def blank_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor that shows whether it was written: full of NaN, or else with version 0."""
    filler = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(shape, filler, dtype=dtype, device=device)


def is_blank(value: torch.Tensor) -> bool:
    """Return whether a blank tensor still has elements that no reset wrote."""
    if not (value.is_floating_point() or value.is_complex()):
        return bool(value.numel()) and version(value) == 0
    # Why the sum: it is NaN if an element is, and takes a fifteenth of the time of isnan.
    if value.dtype.itemsize > 1 and not value.detach().sum().isnan():
        return False
    return bool(value.detach().isnan().any())


def was_written(value: torch.Tensor | None, blank: torch.Tensor, name: str) -> bool:
    """Return whether a reset wrote ``blank`` or assigned a tensor; raise if it wrote a part."""
    # Note: a reset that assigns a parameter has written all of it.
    if value is None or value is not blank:
        return value is not None
    if not is_blank(value):
        return True
    if not value.isnan().all() and (value.is_floating_point() or value.is_complex()):
        raise ValueError(
            f"{name!r} still has elements that its module's reset did not write, or wrote NaN to: "
            "write every element"
        )
    return False


def check_written(unwritten: Collection[str]) -> None:
    """Raise if a tensor was left unwritten."""
    if unwritten:
        raise ValueError(
            "every parameter, and every buffer on meta, must be written by the reset of a module "
            f"that holds it; no reset wrote {[*unwritten][:6]}: pass reset=function, which is "
            "called with each module, or give buffers their values"
        )


def allocate_buffers(module: nn.Module, device: torch.device) -> Tensors:
    """Move the module's buffers to ``device``; return those that were on meta and are blank."""
    blanks: Tensors = {}
    moved_buffers: dict[int, torch.Tensor] = {}
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            blanks[name] = blank_tensor(buffer.shape, buffer.dtype, device)
        moved_buffers[id(buffer)] = blanks.get(name, buffer).to(device)
    # Why every table: one buffer may stand in several.
    for m in module.modules():
        m._buffers.update(
            {key: moved_buffers[id(b)] for key, b in m._buffers.items() if b is not None}
        )
    return blanks


def unwritten_buffers(module: nn.Module, blanks: NamedTensors) -> list[str]:
    """Return the names of the buffers of ``allocate_buffers`` that no reset wrote."""
    buffers = dict(module.named_buffers())
    return [
        name
        for name, blank in sorted(blanks.items())
        if not was_written(buffers.get(name), blank, name)
    ]


def in_apply_order(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield paths and modules in the order of ``nn.Module.apply``, children first."""
    for name, child in module.named_children():
        yield from in_apply_order(child, f"{path}.{name}".removeprefix("."))
    yield path, module


def own_reset(module: nn.Module) -> Callable[[], object] | None:
    """Return the method by which a module resets its own tensors, if it has one."""
    method: Any = getattr(module, "reset_parameters", None)
    return method or getattr(module, "_reset_parameters", None)


@contextlib.contextmanager
def compared(checksums: LeafChecksums) -> Iterator[None]:
    """Compare the checksums at the end of the block, also if it failed on one rank."""
    fault: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind, because other ranks wait
        fault = error
    checksums.compare(fault)
