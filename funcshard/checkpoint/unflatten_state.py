"""The other way round from ``pieces``: an outline and named tensors to one rank's state, under the same plan or another.

``put_together`` decides what the state looks like and which runs of which named tensors go where; it allocates the tensors
and returns the runs as requests. Who answers them, from memory (``replan``) or from files (``checkpoint``), is another's
business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.checkpoint.flatten_state import Item, Outline, PerRank, find_class, kind_of, listed, stored_name
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan, dtype_of

__all__ = ["Place", "Request", "Wanted", "put_together"]

Place = Callable[[Item, UnitPlan | None], torch.device]


_CONTAINERS = ("dict", "ordered_dict", "list", "tuple", "namedtuple", "custom")


@dataclass(frozen=True, slots=True)
class Request:
    """Elements of the tensor stored as ``name``, from ``begin`` in its flat order, that have to go into ``out``, 1-D."""

    name: str
    begin: int
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class Wanted:
    """A state whose tensors are still to be filled.

    Attributes:
        state: the tree.
        requests: what goes into its tensors.
    """

    state: Any
    requests: list[Request]
    _alike: list[tuple[str, list[str], list[torch.Tensor]]] = field(default_factory=list)

    def check(self) -> None:
        """Once it is filled: raise ``ValueError`` unless leaves that now share a buffer had the same tensors beside it."""
        for where, names, tensors in self._alike:
            for name, tensor in zip(names, tensors, strict=True):
                if not torch.equal(tensor, tensors[0]):
                    raise _apart(where, names[0], name, tensors[0].tolist(), tensor.tolist())


def put_together(
    outline: Outline,
    own: Sequence[Outline],
    items: Mapping[str, Item],
    plan: Plan,
    rank: int,
    old: tuple[int, int],
    place: Place,
) -> Wanted:
    """Make one rank's state, with tensors that are still to be filled.

    Arguments:
        outline: the tree's.
        own: the outlines of the ``PerRank`` values that this rank takes.
        items: the tensors by name, those of the rank that it takes them from included.
        plan: how the trees that look like shards are cut now.
        rank: this rank.
        old: sizes of the mesh axes that the state was cut for; local tensors are taken modulo these.
        place: on which device an item of a unit, or of none, goes.

    Raises:
        ValueError: the plan is of another model, or leaves that it puts together differ in what stands beside them.
    """
    maker = _Maker(own, items, plan, rank, old, place, [], [])
    return Wanted(maker.node(outline), maker.requests, maker.alike)


@dataclass(slots=True)
class _Maker:
    own: Sequence[Outline]
    items: Mapping[str, Item]
    plan: Plan
    rank: int
    old: tuple[int, int]
    place: Place
    requests: list[Request]
    alike: list[tuple[str, list[str], list[torch.Tensor]]]

    def node(self, outline: Outline) -> Any:
        if outline is None:
            return None
        what = outline[0]
        if what == "value":
            return outline[1]
        if what == "tensor":
            return self._tensor(outline[1])
        if what == "rank":
            return PerRank(self.node(self.own[outline[1]]))
        if what == "shards":
            return self._shards(outline[1], dict(outline[2]))
        return _container(outline, [self.node(child) for child in outline[3]])

    def _tensor(self, name: str) -> torch.Tensor:
        item = self.items[name]
        out = torch.empty(item.shape, dtype=dtype_of(item.dtype), device=self.place(item, None))
        self.requests.append(Request(name, 0, out.view(-1)))
        return out

    def _shards(self, form: str, by_leaf: dict[str, Outline]) -> Any:
        inner: dict[tuple[str, str], Any] = {}
        used: set[str] = set()
        for unit in self.plan.unit_list:
            for buffer in unit.buffers:
                paths = [next((p for p in (s.path, *s.aliases) if p in by_leaf), None) for s in buffer.leaves]
                found = [path for path in paths if path is not None]
                if not found:
                    continue
                if len(found) < len(paths):
                    absent = buffer.leaves[paths.index(None)].path
                    raise ValueError(
                        f"the plan puts leaves {found[0]!r} and {absent!r} into one buffer, and the state has a part that "
                        f"holds the first but not the second: it is of another model, or other leaves were trainable"
                    )
                used.update(found)
                below = [by_leaf[path] for path in found]
                inner[unit.name, buffer.key] = self._below(below, unit, buffer, unit.title)
        if unknown := sorted(by_leaf.keys() - used):
            raise ValueError(
                f"the state has the leaf {unknown[0]!r}, which is not in the plan: the plan is of another model"
            )
        if form in ("list", "tuple"):
            pairs = listed(self.plan, trainable=not any(not b.trainable for u, b in self._pairs(inner)))
            flat = [inner[unit.name, buffer.key] for unit, buffer in pairs if (unit.name, buffer.key) in inner]
            return flat if form == "list" else tuple(flat)
        shards: dict[str, dict[str, Any]] = {}
        for unit in self.plan.unit_list:
            held = {buffer.key: inner[unit.name, buffer.key] for buffer in unit.buffers if (unit.name, buffer.key) in inner}
            if held or form == "every unit":
                shards[unit.name] = held
        return shards

    def _pairs(self, inner: Mapping[tuple[str, str], Any]) -> list[tuple[UnitPlan, BufferPlan]]:
        return [
            (unit, buffer) for unit in self.plan.unit_list for buffer in unit.buffers if (unit.name, buffer.key) in inner
        ]

    def _below(self, outlines: Sequence[Outline], unit: UnitPlan, buffer: BufferPlan, where: str) -> Any:
        """What hangs below one buffer, from what hung at each of its leaves."""
        first, paths = outlines[0], [spec.path for spec in buffer.leaves]
        for path, other in zip(paths, outlines, strict=True):
            if _shape(other) != _shape(first):
                raise ValueError(
                    f"the plan puts leaves {paths[0]!r} and {path!r} into one buffer of unit {where!r}, and what stands "
                    f"beside them in the state is built differently: keep them in separate units"
                )
            if other is not None and other[0] == "value" and other != first:
                raise _apart(where, paths[0], path, first[1], other[1])
        if first is None or first[0] in ("value", "rank"):
            return self.node(first)
        if first[0] == "tensor":
            return self._put(outlines, unit, buffer, where)
        children = [self._below([outline[3][i] for outline in outlines], unit, buffer, where) for i in range(len(first[3]))]
        return _container(first, children)

    def _put(self, outlines: Sequence[Outline], unit: UnitPlan, buffer: BufferPlan, where: str) -> torch.Tensor:
        names = [outline[1] for outline in outlines]
        items = [self.items[name] for name in names]
        for name, item in zip(names, items, strict=True):
            if (item.dtype, item.kind) != (items[0].dtype, items[0].kind):
                raise ValueError(
                    f"the plan puts {names[0]!r} and {name!r} into one buffer of unit {where!r}, and they are stored as "
                    f"{items[0].kind} {items[0].dtype} and as {item.kind} {item.dtype}: keep them in separate units"
                )
        if items[0].kind in ("whole", "rank"):
            tensors = [self._tensor(name) for name in names]
            self.alike.append((where, [spec.path for spec in buffer.leaves], tensors))
            return tensors[0]
        if items[0].kind != kind_of(buffer):
            raise ValueError(
                f"{names[0]!r} is local to ranks in one of the two plans only; make the new plan with the same local"
            )
        device = self.place(items[0], unit)
        shard = torch.zeros(
            buffer.shard_numel, dtype=dtype_of(items[0].dtype), device=device,
            pin_memory=device.type == "cpu" and self.place(items[0], None).type == "cuda",
        )  # fmt: skip
        for spec, name, item in zip(buffer.leaves, names, items, strict=True):
            self._fill(shard, spec, buffer, name, item)
        return shard

    def _fill(self, shard: torch.Tensor, spec: LeafSpec, buffer: BufferPlan, name: str, item: Item) -> None:
        if item.shape != spec.shape:
            raise ValueError(
                f"leaf {spec.path!r} has shape {spec.shape} in the plan; found {item.shape} stored as {name!r}: the plan is "
                f"of another model"
            )
        begin = self.rank % self.plan.mesh_shape[1] * buffer.shard_numel if buffer.shards > 1 else 0
        low, high = max(begin, spec.offset), min(begin + buffer.shard_numel, spec.offset + spec.numel)
        if low < high:
            stored = stored_name(name, item.kind, self._source(item.kind), self.old)
            self.requests.append(Request(stored, low - spec.offset, shard[low - begin : high - begin]))

    def _source(self, kind: str) -> int:
        """The old rank that a local tensor is taken from: this rank modulo theirs, or the place along each axis is."""
        replicate, shard = self.old
        if kind == "local":
            return self.rank % (replicate * shard)
        outer, inner = divmod(self.rank, self.plan.mesh_shape[1])
        return outer % replicate * shard + inner % shard


def _container(outline: Outline, children: list[Any]) -> Any:
    kind, fields, meta, _ = outline
    if kind not in _CONTAINERS:
        raise ValueError(
            f"a state cannot hold a container of kind {kind!r}; it was stored by a newer version, or is damaged"
        )
    if kind == "namedtuple":
        cls: Any = find_class(meta)
        if not issubclass(cls, tuple) or not hasattr(cls, "_fields"):
            raise ValueError(f"the state has a namedtuple {meta!r} in it, and that is another class now: define it again")
        if unknown := set(fields) - set(cls._fields):
            raise ValueError(f"the stored {meta} has the field {sorted(unknown)[0]!r}, and the class has {cls._fields} now")
        return cls(**dict(zip(fields, children, strict=True)))
    meta = tree.freeze(meta)
    if kind == "custom":
        find_class(meta[0])
    try:
        return tree.build((kind, meta, tuple(range(len(children)))), children)
    except AssertionError:
        raise ValueError(
            f"the state has a {meta[0]} in it, which is not registered with optree: register it first"
        ) from None


def _shape(outline: Outline) -> Any:
    """How an outline is built, without what stands at its leaves."""
    if outline is None or outline[0] in ("value", "tensor", "rank"):
        return outline and outline[0]
    return (outline[0], repr(outline[2]), len(outline[3]))


def _apart(where: str, one: str, other: str, here: Any, there: Any) -> ValueError:
    return ValueError(
        f"the plan puts leaves {one!r} and {other!r} into one buffer of unit {where!r}, and what the state keeps once a "
        f"buffer is {here} for the first and {there} for the second: keep them in separate units"
    )
