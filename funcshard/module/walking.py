"""Walks over the modules and tensors of a tree; quicker than torch's for trees of many modules.

torch's walks are generators inside generators, one for each level of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["named_modules", "named_tensors"]

_WALKS = ("named_modules", "named_parameters", "named_buffers", "_named_members", "modules", "parameters", "buffers")


def named_modules(module: nn.Module, *, unique: bool = True) -> list[tuple[str, nn.Module]]:
    """Return path and module of every module of a tree, parents first, as torch does.

    Arguments:
        module: the root.
        unique: whether a module with several paths comes once, by its first path.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(each: nn.Module, path: str) -> None:
        if unique:
            if id(each) in seen:
                return
            seen.add(id(each))
        found.append((path, each))
        for name, child in each._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name)

    visit(module, "")
    return found if _walk_as_usual(found) else list(module.named_modules(remove_duplicate=unique))


def named_tensors(
    module: nn.Module, kind: str, modules: list[tuple[str, nn.Module]], *, unique: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of the parameters or buffers of a tree, as torch does.

    Arguments:
        module: the root.
        kind: ``"parameters"`` or ``"buffers"``.
        modules: as ``named_modules`` returned them, with the same ``unique``.
        unique: whether a tensor with several names comes once, by its first name.
    """
    if not _walk_as_usual(modules):
        yield from getattr(module, f"named_{kind}")(remove_duplicate=unique)
        return
    seen: set[int] = set()
    for path, each in modules:
        for key, tensor in getattr(each, f"_{kind}").items():
            if tensor is None or (unique and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield f"{path}.{key}" if path else key, tensor


def _walk_as_usual(modules: list[tuple[str, nn.Module]]) -> bool:
    """Return whether no class of a module walks in a way of its own."""
    classes = {type(m) for _, m in modules}
    return all(getattr(cls, name) is getattr(nn.Module, name) for cls in classes for name in _WALKS)
