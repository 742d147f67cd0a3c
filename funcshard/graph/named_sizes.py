"""``NamedSizes``: the dims of a batch that may have other sizes in later calls, by name."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import tree

Names = tuple[str | None, ...]  # of each dim of a tensor; ``None`` for a dim of a fixed size


class NamedSizes:
    """The names that ``trace(dynamic_shapes=...)`` gives to dims of the batch.

    Arguments:
        spec: a text such as ``"b, t, ..."`` for all tensors of the batch; or a tree with a text or
            ``None`` in the place of each part of the batch. ``None``: no dim has a name.

    Raises:
        ValueError: a text is not of that form.
        TypeError: the tree holds something else.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        for dims_text in _texts(spec):
            _parts(dims_text)
        # By form of the arguments: the text of each leaf.
        self._known: dict[Any, dict[int, str]] = {}

    def of(self, leaves: Sequence[Any], form: Any) -> dict[int, Names]:
        """Return the names of the dims of each leaf of ``(state, batch)`` that has any.

        Raises:
            ValueError: the batch has not the form of the tree, or a tensor lacks a dim.
        """
        if self.spec is None:
            return {}
        texts = self._known.get(form)
        if texts is None:
            _, batch = tree.build_form(form, range(form.num_leaves))
            texts = self._known[form] = dict(_spread(self.spec, batch, "batch"))
        dims_by_name = {}
        for leaf_index, dims_text in texts.items():
            leaf = leaves[leaf_index]
            if isinstance(leaf, torch.Tensor):
                dims_by_name[leaf_index] = _names(dims_text, leaf)
        return dims_by_name


def _texts(spec: Any) -> Iterator[str]:
    if isinstance(spec, str):
        yield spec
    elif isinstance(spec, Mapping | tuple | list):
        for sub_spec in spec.values() if isinstance(spec, Mapping) else spec:
            yield from _texts(sub_spec)
    elif spec is not None:
        raise TypeError(
            "dynamic_shapes is a text such as 'b, ...', or a tree of texts and None in the form "
            f"of the batch; found {type(spec).__name__}"
        )


def _parts(text: str) -> tuple[list[str | None], bool]:
    """Return the names in a text, and whether further dims may follow."""
    parts = [part.strip() for part in text.split(",")]
    has_more = parts[-1] == "..."
    names = parts[:-1] if has_more else parts
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(
                "dynamic_shapes names the sizes that may change: 'b, ...' for dim 0, 'b, t' for "
                "two dims, with _ for a fixed one and ... at the end for all further ones; found "
                f"{text!r}"
            )
    return [None if name == "_" else name for name in names], has_more


def _spread(spec: Any, batch: Any, path: str) -> Iterator[tuple[int, str]]:
    """Yield the text for each leaf of a batch, whose leaves are their numbers."""
    if spec is None:
        return
    if isinstance(spec, str):
        yield from ((leaf_index, spec) for leaf_index in tree.leaves(batch))
        return
    if isinstance(spec, Mapping):
        fits = isinstance(batch, Mapping) and batch.keys() == spec.keys()
        keys: Sequence[Any] = list(spec)
    else:
        fits = isinstance(batch, tuple | list) and len(batch) == len(spec)
        keys = range(len(spec))
    if not fits:
        raise ValueError(
            "dynamic_shapes has the form of the batch, with a text or None for each part; found "
            f"{_shape(spec)} for `{path}`, which is {_shape(batch)}"
        )
    for key in keys:
        yield from _spread(spec[key], batch[key], f"{path}[{key!r}]")


def _shape(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dictionary with the keys {sorted(map(str, value))}"
    return (
        f"a {type(value).__name__} of {len(value)}"
        if isinstance(value, tuple | list)
        else "one leaf"
    )


def _names(text: str, tensor: torch.Tensor) -> Names:
    names, has_more = _parts(text)
    if len(names) > tensor.ndim or (len(names) < tensor.ndim and not has_more):
        raise ValueError(
            f"dynamic_shapes={text!r} names {len(names)} dims; found a tensor of shape "
            f"{list(tensor.shape)} in the batch: pass a tree of texts in the form of the batch, "
            "with None for tensors of fixed shapes, and '...' for further dims"
        )
    return tuple(names) + (None,) * (tensor.ndim - len(names))


def sizes_of(leaves: Sequence[Any], names: Mapping[int, Names]) -> dict[str, int]:
    """Return the size of each name.

    Raises:
        ValueError: two dims of one name have different sizes.
    """
    sizes_by_name: dict[str, int] = {}
    for leaf_index, named_dims in names.items():
        for name, size in zip(named_dims, leaves[leaf_index].shape, strict=True):
            if name is not None and sizes_by_name.setdefault(name, size) != size:
                raise ValueError(
                    f"dynamic_shapes gives the name {name!r} to dims of one size; found the sizes "
                    f"{sizes_by_name[name]} and {size} in the batch: give them two names"
                )
    return sizes_by_name
