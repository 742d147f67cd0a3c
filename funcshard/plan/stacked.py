"""Stacked layers, as ``lax.scan`` has them: one leaf of shape ``[L, ...]`` for L equal layers.

A unit consists of whole leaves, so a stack is one unit. ``unstack`` turns it into L layers, which
can be L units.
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
        The tree, with a list of L trees at ``path``. Their leaves are views of yours, real or on
        meta, and gradients flow through them.

    Raises:
        ValueError: there is no such node, or its leaves have no first dimension of one size.

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
    return _changed("unstack", params, path, _unstacked)


def stack(params: Any, path: str) -> Any:
    """Return the tree with a list of layers as one stack; ``unstack`` is the inverse.

    Arguments:
        params: a pytree, such as the result of ``gather``.
        path: dotted path of a list or tuple of trees of the same structure.

    Returns:
        The tree, with one tree at ``path``, whose leaves have the shape ``[L, ...]``. A leaf that
        is ``None`` in all layers, such as a gradient of a frozen one, stays ``None``.

    Raises:
        ValueError: there is no such list, it is empty, or its trees differ in structure, shapes or
            dtypes.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.stack({"blocks": [{"b": torch.zeros(3)}, {"b": torch.ones(3)}]}, "blocks")
        {'blocks': {'b': tensor([[0., 0., 0.],
                [1., 1., 1.]])}}

    Source: ``jax.lax.scan``.
    """
    return _changed("stack", params, path, _stacked)


def _unstacked(node: Any, path: str) -> list[Any]:
    first_dims = {tuple(getattr(leaf, "shape", ()))[:1] for leaf in tree.leaves(node)}
    if len(first_dims) != 1 or () in first_dims:
        raise ValueError(
            f"all leaves at {path!r} must be tensors of one first dimension, of the size of the "
            f"number of layers; found {sorted(first_dims) or 'no leaf'}: pass the path of the "
            "stacked layers alone"
        )
    ((count,),) = first_dims
    return [tree.map(lambda leaf, i=i: leaf[i], node) for i in range(count)]


def _stacked(node: Any, path: str) -> Any:
    if not isinstance(node, (list, tuple)) or not node:
        raise ValueError(
            "stack takes the path of a list of layers, as unstack makes it, and not of an empty one; "
            f"found {type(node).__name__} at {path!r}"
        )
    layer_forms = [tree.map(lambda leaf: (leaf.shape, leaf.dtype), layer) for layer in node]
    for i, layer_form in enumerate(layer_forms):
        if layer_form != layer_forms[0]:
            raise ValueError(
                f"all layers at {path!r} must have the same leaves, of one shape and dtype; layer "
                f"{i} differs from layer 0, {layer_form} from {layer_forms[0]}: stack equal layers "
                "alone"
            )
    return tree.map(lambda *leaves: torch.stack(leaves), *node)


def _changed(name: str, params: Any, path: str, change: Callable[[Any, str], Any]) -> Any:
    """Return ``params`` with ``change(node, path)`` in place of the node at a path."""
    if not isinstance(path, str):
        raise TypeError(
            f"{name} takes the dotted path of a node, such as 'blocks'; found {path!r}"
        )
    node = params
    for key in path.split(".") if path else ():
        children = _children(node)
        if key not in children:
            raise ValueError(
                f"{name} found no node {path!r} in the tree: {key!r} is none of "
                f"{list(children)[:6]}"
            )
        node = children[key]
    new_node = change(node, path)
    return tree.map_with_path(
        # Why by path too: a tied node is at several places.
        lambda leaf_path, leaf: new_node if leaf_path == path else leaf,
        params,
        is_leaf=lambda inner: inner is node,
    )


def _children(node: Any) -> dict[str, Any]:
    """Return the children of a container by component of a path."""
    # Note: trees take a subclass of dict for a leaf.
    if [id(leaf) for leaf in tree.leaves(node)] == [id(node)]:
        return {}
    if isinstance(node, (list, tuple)):
        node = dict(zip(getattr(node, "_fields", range(len(node))), node, strict=True))
    return (
        {str(key): child for key, child in node.items()}
        if isinstance(node, Mapping)
        else {}
    )
