"""Stacked layers, as ``lax.scan`` has them: one leaf of shape ``[L, ...]`` for L equal layers.

A unit consists of whole leaves, so a stack is one unit. ``unstack`` makes a list of L layers of it,
which can be L units; ``stack`` is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from funcshard._utils import tree


def unstack(params: Any, path: str) -> Any:
    """Return the tree with a stack of layers as a list of layers; ``stack`` is the inverse.

    Arguments:
        params: a pytree of dictionaries, lists and tuples.
        path: dotted path of a node, all of whose leaves have the shape ``[L, ...]``.

    Returns:
        The tree, with a list of L trees at ``path``. Their leaves are views of those in ``params``,
        real or on meta, and gradients flow through them.

    Raises:
        TypeError: a leaf at ``path`` is not a tensor.
        ValueError: there is no such node; its leaves have no first dimension, or first dimensions
            of different sizes.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"blocks": {"w": torch.zeros(4, 3, 3), "b": torch.zeros(4, 3)}}
        >>> layers = fs.unstack(params, "blocks")
        >>> plan = fs.make_plan(layers, 2, units=["blocks.*"])
        >>> [unit.name for unit in plan.unit_list if unit.leaves]
        ['blocks.0', 'blocks.1', 'blocks.2', 'blocks.3']
        >>> fs.stack(layers, "blocks")["blocks"]["w"].shape
        torch.Size([4, 3, 3])

    Source: ``jax.lax.scan``.
    """
    return _changed("unstack", params, path, lambda node: _unstacked(node, path))


def stack(params: Any, path: str) -> Any:
    """Return the tree with a list of layers as one stack; ``unstack`` is the inverse.

    Arguments:
        params: a pytree, such as the result of ``gather``.
        path: dotted path of a list or tuple of trees of the same structure.

    Returns:
        The tree, with one tree at ``path``, whose leaves have the shape ``[L, ...]``. A leaf that
        is ``None`` in all layers, such as a gradient of a frozen one, stays ``None``.

    Raises:
        ValueError: there is no such list, it is empty, or its trees differ in their structure, or
            in the shapes or dtypes of leaves.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.stack({"blocks": [{"b": torch.zeros(3)}, {"b": torch.ones(3)}]}, "blocks")
        {'blocks': {'b': tensor([[0., 0., 0.],
                [1., 1., 1.]])}}

    Source: ``jax.lax.scan``.
    """
    return _changed("stack", params, path, lambda node: _stacked(node, path))


def _unstacked(node: Any, path: str) -> list[Any]:
    leaves = dict(zip(tree.paths(node), tree.leaves(node), strict=True))
    for name, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"unstack takes stacks of tensors; found {type(leaf).__name__} at "
                f"{f'{path}.{name}'.strip('.')!r}"
            )
    sizes = {f"{path}.{name}".strip("."): tuple(leaf.shape)[:1] for name, leaf in leaves.items()}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        stacked_sizes = list(sizes.items())
        differing_sizes = (
            stacked_sizes[:1]
            + [item for item in stacked_sizes if item[1] != stacked_sizes[0][1]][:1]
        )
        differing = [f"{size[0] if size else None} of {name!r}" for name, size in differing_sizes]
        raise ValueError(
            f"all leaves at {path!r} must have one first dimension, of the size of the number of layers; found "
            f"{', '.join(differing) or 'no leaf'}: pass the path of the stacked layers alone"
        )
    (count,) = next(iter(sizes.values()))
    return [tree.map(lambda leaf, i=i: leaf[i], node) for i in range(count)]


def _stacked(node: Any, path: str) -> Any:
    if not isinstance(node, (list, tuple)) or not node:
        raise ValueError(
            "stack takes the path of a list of layers, as unstack makes it; found "
            f"{type(node).__name__} at {path!r}, "
            f"{'empty' if isinstance(node, (list, tuple)) else 'which is no list'}"
        )
    first = [
        (name, _kind(leaf))
        for name, leaf in zip(tree.paths(node[0]), tree.leaves(node[0]), strict=True)
    ]
    for i, layer in enumerate(node):
        leaf_forms = [
            (name, _kind(leaf))
            for name, leaf in zip(tree.paths(layer), tree.leaves(layer), strict=True)
        ]
        if leaf_forms != first:
            wrong = next(
                iter(
                    [
                        item
                        for item in [*leaf_forms, *first]
                        if (item in leaf_forms) != (item in first)
                    ]
                ),
                ("order", ""),
            )
            raise ValueError(
                f"all layers at {path!r} must have the same leaves, of one shape and dtype; layer "
                f"{i} differs from layer 0 in {wrong[0]!r}: stack equal layers alone"
            )
    return tree.map(lambda *leaves: torch.stack(leaves), *node)


def _kind(leaf: Any) -> Any:
    return (
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
    )


def _changed(name: str, params: Any, path: str, change: Callable[[Any], Any]) -> Any:
    """Return ``params`` with ``change(node)`` in place of the node at a path."""
    if not isinstance(path, str):
        raise TypeError(f"{name} takes the dotted path of a node, such as 'blocks'; found {path!r}")

    def visit(node: Any, keys: list[str]) -> Any:
        if not keys:
            return change(node)
        key, *inner_keys = keys
        if (
            isinstance(node, Mapping)
            and (found_key := next((k for k in node if str(k) == key), None)) is not None
        ):
            new = {
                k: visit(value, inner_keys) if k is found_key else value
                for k, value in node.items()
            }
            return new if type(node) is dict else type(node)(new)  # type: ignore[call-arg]
        fields = getattr(node, "_fields", None)
        if fields and key in fields:
            return node._replace(**{key: visit(getattr(node, key), inner_keys)})
        if (
            isinstance(node, (list, tuple))
            and not fields
            and key.isdecimal()
            and int(key) < len(node)
        ):
            items = [
                visit(value, inner_keys) if i == int(key) else value for i, value in enumerate(node)
            ]
            return items if isinstance(node, list) else tuple(items)
        known_keys = (
            list(node)
            if isinstance(node, Mapping)
            else list(fields or range(len(node)) if isinstance(node, (list, tuple)) else [])
        )
        raise ValueError(
            f"{name} found no node {path!r} in the tree: {key!r} is none of {known_keys[:6]}"
        )

    return visit(params, path.split(".") if path else [])
