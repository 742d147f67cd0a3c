"""Pytrees: leaves, dotted paths, and tree structures as plain data.

A *path* joins the keys from the root to a leaf with dots (``blocks.0.attn.weight``). So a nested
tree and a flat dictionary with dotted keys give a leaf the same path.

A *structure* describes a tree without its leaves, as data that can be hashed and stored as JSON:

- an integer represents the leaf of that index,
- ``None`` represents ``None`` in the tree, which is not a leaf,
- ``(kind, meta, children)`` represents a container. A class is named ``module:qualname``.

Inputs and outputs of modules aren't always pytrees. So ``map_tensors``, ``cast_tree`` and
``tensors_in`` look into tuples, named tuples, lists, mappings, dataclasses and packed sequences, if
these can be read.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any

import optree
import torch

Structure = Any  # int | None | tuple[str, Any, tuple["Structure", ...]]

# The most containers inside each other, and keys of a path. Why a limit: Python, its JSON and
# optree walk trees by recursion, which Python bounds.
DEEPEST = 200

_PACKAGE = __name__.partition(".")[0]

# In this namespace of optree, dictionaries keep the order of insertion; see ``insertion_order``.
# Why never left: leaving it would concern all threads.
_KEEP_ORDER = optree.dict_insertion_ordered(True, namespace=_PACKAGE)
_KEEP_ORDER.__enter__()


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of ``tree``, with keys of dictionaries sorted, so all ranks agree."""
    return optree.tree_leaves(tree)


def flatten(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Return the leaves of ``tree``, and a function from leaves to such a tree."""
    flat_leaves, tree_spec = optree.tree_flatten(tree)
    return flat_leaves, tree_spec.unflatten


def flatten_with_form(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of ``tree``, and its form for ``build_form``.

    You can hash and compare forms, faster than structures.
    """
    return optree.tree_flatten(tree)


def build_form(form: Any, values: Iterable[Any]) -> Any:
    """Return the tree of a form with these leaves."""
    return form.unflatten(values)


def form_of(structure: Structure) -> Any:
    """Return the form of a structure from a file, without importing anything.

    Raises:
        ValueError: it's no structure, its leaves aren't in order, or a class isn't loaded.
    """
    check_structure(structure)
    tree_spec, leaf_order = _spec(structure)
    if leaf_order != tuple(range(len(leaf_order))):
        raise ValueError(
            "the leaves of the file's tree are not in order, so the file is damaged"
        )
    return tree_spec


def paths(tree: Any) -> list[str]:
    """Return the dotted path of each leaf of ``tree``."""
    return _dotted(optree.tree_paths(tree))


def _dotted(key_paths: Iterable[Sequence[Any]]) -> list[str]:
    # Why no map: it is the function of this file here, which walks into keys that are tuples.
    return [".".join([str(key) for key in keys]) for keys in key_paths]


def code_paths(tree: Any, name: str) -> list[str]:
    """Return the Python expression for each leaf of a tree with this name."""
    return [accessor.codify(name) for accessor in optree.tree_accessors(tree)]


def replaced(
    values: Sequence[Any], indices: Sequence[int], new_values: Iterable[Any]
) -> list[Any]:
    """Return ``values`` as a list, with new ones at some indices."""
    all_values = list(values)
    for index, value in zip(indices, new_values, strict=True):
        all_values[index] = value
    return all_values


def leaves_up_to(tree: Any, deeper: Any) -> list[Any]:
    """Return the subtrees of ``deeper`` at the leaves of ``tree``."""
    return optree.tree_structure(tree).flatten_up_to(deeper)


def map(function: Callable[..., Any], tree: Any, *rest: Any, of_none: bool = False) -> Any:
    """Return a tree of ``function(*leaves)`` for trees of one structure; ``None`` isn't a leaf.

    With ``of_none``, the function is called where trees hold ``None`` too.
    """
    return optree.tree_map(function, tree, *rest, none_is_leaf=of_none)


def map_with_path(
    function: Callable[[str, Any], Any], tree: Any, is_leaf: Callable[[Any], bool]
) -> Any:
    """Return a tree of ``function(path, leaf)``; paths have the fields of namedtuples.

    Nodes for which ``is_leaf`` is true are leaves too.
    """

    def at(accessor: Any, leaf: Any) -> Any:
        keys = [str(getattr(entry, "field", entry.entry)) for entry in accessor]
        return function(".".join(keys), leaf)

    return optree.tree_map_with_accessor(at, tree, is_leaf=is_leaf)


def describe(
    tree: Any,
    check: Callable[[str, Any, Sequence[Any], str], None] | None = None,
    *,
    above: str = "",
) -> tuple[Structure, list[Any], list[str]]:
    """Split ``tree`` into ``(structure, leaves, paths)``; ``build`` is the inverse.

    Arguments:
        tree: the tree.
        check: ``check(kind, meta, entries, path)``, called for each container; it may raise.
        above: the path of ``tree`` in a larger tree.

    Raises:
        TypeError: a container can't be data, such as a ``defaultdict`` or a custom node with
            unhashable metadata.
        ValueError: two leaves have one path, or containers are nested too deeply.
    """
    walk = _Walk(check)
    structure = walk.visit(tree, above, 0)
    paths = walk.paths
    if len(set(paths)) != len(paths):
        path_twice = next(p for p, uses in Counter(paths).items() if uses > 1)
        raise ValueError(
            f"two leaves of the tree have the path {path_twice!r}; paths join keys with dots, and "
            "every leaf needs a different path: rename one of the keys"
        )
    return structure, walk.leaf_values, paths


# Why no function inside of describe: it would refer to itself and to the leaves, which would stay
# in memory until Python looks for such garbage.
@dataclasses.dataclass(slots=True, eq=False)
class _Walk:
    """A walk of ``describe``."""

    check: Any
    leaf_values: list[Any] = dataclasses.field(default_factory=list)
    paths: list[str] = dataclasses.field(default_factory=list)
    # The types of leaves; a type of nodes is never one of leaves too.
    leaf_types: set[type] = dataclasses.field(default_factory=set)

    def visit(self, node: Any, path: str, depth: int) -> Structure:
        if type(node) in self.leaf_types or optree.tree_is_leaf(node):
            self.leaf_types.add(type(node))
            self.leaf_values.append(node)
            self.paths.append(path)
            return len(self.leaf_values) - 1
        if node is None:
            return None
        if depth == DEEPEST:
            raise ValueError(too_deep(path, "containers inside each other"))
        level = optree.tree_flatten_one_level(node)
        children, metadata, entries = level[0], level[1], level[2]
        node_kind, meta = _kind(node, metadata, path)
        if self.check is not None:
            self.check(node_kind, meta, entries, path)
        inner_structures = []
        # Why no comprehension: it would take a second frame of Python's bounded stack.
        for child, entry in zip(children, entries, strict=True):
            inner_structures.append(
                self.visit(child, f"{path}.{entry}" if path else str(entry), depth + 1)
            )
        return (node_kind, meta, tuple(inner_structures))


def too_deep(path: str, what: str) -> str:
    """Return the words of the error for more than ``DEEPEST`` of ``what`` at a path."""
    shown_path = path if len(path) < 80 else f"{path[:40]}…{path[-20:]}"
    return f"the tree has more than {DEEPEST} {what} at {shown_path!r}: use lists, or fewer and longer keys"


def insertion_order(tree: Any) -> list[tuple[str, Any]]:
    """Return path and value of each leaf, with keys in the order of insertion."""
    flat_leaves = optree.tree_leaves(tree, namespace=_PACKAGE)
    return list(
        zip(_dotted(optree.tree_paths(tree, namespace=_PACKAGE)), flat_leaves, strict=True)
    )


def as_inserted(structure: Structure, tree: Any) -> Structure:
    """Return the structure of ``tree`` with keys in the order of insertion."""
    if structure is None or isinstance(structure, int):
        return structure
    node_kind, meta, children = structure
    child_trees = optree.tree_flatten_one_level(tree)[0]
    inner_structures = tuple(
        as_inserted(child, node) for child, node in zip(children, child_trees, strict=True)
    )
    if node_kind != "dict":
        return (node_kind, meta, inner_structures)
    # Note: a child without leaves has a place too, so positions of leaves don't tell the order.
    inner_by_key = dict(zip(meta, inner_structures, strict=True))
    return (node_kind, tuple(tree), tuple(inner_by_key[key] for key in tree))


def with_dicts_in_order(structure: Structure, positions: Sequence[int]) -> Structure:
    """Return ``structure`` with keys of plain dictionaries in the order of leaves.

    Arguments:
        structure: the structure of a tree.
        positions: the position of each leaf, by its number.
    """
    return _in_order(structure, positions)[1]


def _in_order(structure: Structure, positions: Sequence[int]) -> tuple[float, Structure]:
    """Return the first position in ``structure``, and the structure in order."""
    if structure is None:
        return math.inf, structure
    if isinstance(structure, int):
        return positions[structure], structure
    node_kind, meta, children = structure
    ordered_children = [_in_order(child, positions) for child in children]
    first_position = min((position for position, _ in ordered_children), default=math.inf)
    if node_kind == "dict":
        sorted_pairs = sorted(
            zip(meta, ordered_children, strict=True), key=lambda pair: pair[1][0]
        )
        return first_position, (
            node_kind,
            tuple(key for key, _ in sorted_pairs),
            tuple(child for _, (_, child) in sorted_pairs),
        )
    return first_position, (node_kind, meta, tuple(child for _, child in ordered_children))


def build(structure: Structure, values: Sequence[Any]) -> Any:
    """Return the tree of a ``structure`` with these leaves; the inverse of ``describe``."""
    tree_spec, leaf_order = _spec(structure)
    return tree_spec.unflatten([values[i] for i in leaf_order])


def freeze(value: Any) -> Any:
    """Return nested lists, which JSON makes of tuples, as nested tuples."""
    if not isinstance(value, list):
        return value
    frozen_items = []
    for item in value:  # see describe for why no comprehension
        frozen_items.append(freeze(item))
    return tuple(frozen_items)


def is_under(path: str, unit: str) -> bool:
    """Return whether ``path`` is ``unit`` or below it, as every path is below ``""``."""
    return is_under_any(path, [unit])


def is_under_any(path: str, nodes: Iterable[str]) -> bool:
    """Return whether ``path`` is one of ``nodes`` or below one of them."""
    return any(node == "" or path == node or path.startswith(node + ".") for node in nodes)


def upwards(path: str) -> Iterator[str]:
    """Yield ``path`` and every node above it, the root ``""`` last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


@functools.lru_cache(maxsize=4096)
def natural_key(path: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts ``blocks.2`` before ``blocks.10``."""
    return tuple(
        [
            (0, int(part), "") if part.isdecimal() else (1, 0, part)
            for part in re.split(r"(\d+)|\.", path)
            if part
        ]
    )


def _kind(node: Any, metadata: Any, path: str) -> tuple[str, Any]:
    """Return ``kind`` and ``meta`` of a container, or raise if it can't be data."""
    cls = type(node)
    if cls in (list, tuple):
        return cls.__name__, None
    if cls in (dict, OrderedDict):
        return ("dict" if cls is dict else "ordered_dict"), tuple(metadata)
    where = f"at {path!r}" if path else "at the root of the tree"
    if optree.is_namedtuple(node):
        return "namedtuple", _name_of(cls, where)
    # A subclass of dict, such as defaultdict, has state that a structure does not hold.
    is_data = not isinstance(node, dict) and not optree.is_structseq(node)
    try:
        hash(metadata)
    except TypeError:
        is_data = False
    if not is_data:
        raise TypeError(
            f"the {cls.__name__} {where} cannot be part of a plan, which is data; convert it to a "
            "plain dict, list, tuple or namedtuple first"
        )
    return "custom", (_name_of(cls, where), metadata)


def _name_of(cls: type, where: str) -> str:
    """Return the name under which ``loaded_class`` finds a class, or raise."""
    is_inside = cls.__module__.partition(".")[0] == _PACKAGE
    # Why the public name: a stored structure stays valid when the class moves to another file.
    if is_inside and getattr(sys.modules[_PACKAGE], cls.__qualname__, None) is cls:
        return f"{_PACKAGE}:{cls.__qualname__}"
    name = f"{cls.__module__}:{cls.__qualname__}"
    if loaded_class(name) is not cls:
        raise TypeError(
            f"the {cls.__name__} {where} cannot be part of a plan, because its class is not found "
            f"as {name!r}: define the class at the top of a module"
        )
    return name


@functools.lru_cache(maxsize=4096)
def _spec(structure: Structure) -> tuple[optree.PyTreeSpec, tuple[int, ...]]:
    # Why the order is returned too: optree may order the leaves differently from their numbers in
    # the structure, because the structure of a unit numbers them buffer by buffer.
    template = _construct(structure)
    return optree.tree_structure(template), tuple(optree.tree_leaves(template))


def _construct(structure: Structure) -> Any:
    if structure is None or isinstance(structure, int):
        return structure
    node_kind, meta, inner = structure
    children = [_construct(child) for child in inner]
    if node_kind == "list":
        return children
    if node_kind == "tuple":
        return tuple(children)
    if node_kind == "dict":
        return dict(zip(meta, children, strict=True))
    if node_kind == "ordered_dict":
        return OrderedDict(zip(meta, children, strict=True))
    name = meta if node_kind == "namedtuple" else meta[0]
    cls: Any = loaded_class(name)
    if cls is None:
        raise ValueError(
            f"the tree has a {name!r}, which no loaded module has as a class: import the module "
            "first, and define the class at its top level"
        )
    entry: Any = optree.register_pytree_node.get(cls)
    is_known, title = entry is not None, "registered container"
    if node_kind == "namedtuple":
        is_known, title = optree.is_namedtuple_class(cls), node_kind
    if not is_known:
        raise ValueError(
            f"the tree has a {name!r}, which isn't a {title}: register the class with optree first, "
            "or make the plan again"
        )
    try:
        if node_kind == "namedtuple":
            return cls(*children)
        return entry.unflatten_func(meta[1], children)
    # Errors of any kind: it is the code of the class, and the data may be of another one.
    except Exception as error:
        raise ValueError(
            f"the tree has a {meta!r}, which cannot be made of {len(children)} children: {error}"
        ) from error


def entries_of(structure: Structure) -> Sequence[Any]:
    """Return the path entries of a container's children."""
    return optree.tree_flatten_one_level(_construct(structure))[2]


# --- trees that a file describes ------------------------------------------------------------------


# What a file says of a tree is checked before anything is built. Only loaded modules are searched
# for its classes, and no attribute is computed, so that no ``__getattr__`` imports a module.


def loaded_class(name: Any) -> type | None:
    """Return the class of a recorded name, or ``None`` if no loaded module has it."""
    if type(name) is not str:
        return None
    module, _, qualname = name.partition(":")
    named_value: Any = sys.modules.get(module)
    for class_name in qualname.split("."):
        named_value = _namespace(named_value).get(class_name)
        if not _is_class(named_value):
            return None
    return named_value


def _namespace(owner: Any) -> Mapping[str, Any]:
    """Return the names that a module or a class itself holds."""
    # Why not vars: the modules of importlib's LazyLoader are imported when any attribute is asked
    # for, and a metaclass may compute the attributes of its classes.
    if issubclass(type(owner), ModuleType):
        class_namespace: Mapping[str, Any] = object.__getattribute__(owner, "__dict__")
        return class_namespace
    return type.__dict__["__dict__"].__get__(owner) if _is_class(owner) else {}


def _is_class(value: Any) -> bool:
    # Why not isinstance: it asks an object for its __class__, which may be computed.
    return issubclass(type(value), type)


def check_structure(structure: Any) -> int:
    """Return the number of leaves of a structure from a file.

    Raise ``ValueError`` if it's no structure, or if the numbers of its leaves have gaps.
    """
    to_visit, leaf_indices = [structure], set[int]()
    while to_visit:
        node = to_visit.pop()
        if type(node) is int and node >= 0:
            leaf_indices.add(node)
        elif _is_container(node):
            # Children wait in a list, so that a deep tree cannot exhaust the stack.
            to_visit.extend(node[2])
        elif node is not None:
            raise ValueError(
                "a tree must hold leaves, and containers with the keys or the class of each; found "
                f"{str(node)[:60]}"
            )
    if len(leaf_indices) != max(leaf_indices, default=-1) + 1:
        raise ValueError("the leaves of a tree must be numbered from 0, without gaps")
    return len(leaf_indices)


def _is_container(node: Any) -> bool:
    if not (type(node) is tuple and len(node) == 3 and type(node[2]) is tuple):
        return False
    kind, meta, children = node
    try:
        hash(meta)
    except TypeError:
        return False
    if kind in ("dict", "ordered_dict"):
        return type(meta) is tuple and len(set(meta)) == len(meta) == len(children)
    if kind == "custom":
        return type(meta) is tuple and len(meta) == 2 and type(meta[0]) is str
    return (kind in ("list", "tuple") and meta is None) or (
        kind == "namedtuple" and type(meta) is str
    )


# --- the tensors in any structure -----------------------------------------------------------------

# Why asked first: most parts are such. No set of classes, as a class may have no hash.
_TENSORLESS = (int, float, str, torch.dtype, type(None))


def cast_tree(x: Any, dtype: torch.dtype) -> Any:
    """Return ``x`` with floating-point tensors cast to ``dtype``, differentiably."""
    return map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, x
    )


def map_tensors(f: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """Return ``x`` with each tensor replaced by ``f(tensor)``.

    A container in which ``f`` changes nothing stays the same object, so that a list which a module
    appends to stays the caller's.
    """
    if isinstance(x, torch.Tensor):
        return f(x)
    if not isinstance(x, (tuple, list, dict)) and _is_read_only(x):
        return x
    parts = _parts(x)
    # By identity: equality of tensors is a tensor.
    changed_parts = {
        key: mapped_part
        for key, part in parts
        if not isinstance(part, _TENSORLESS)
        and (mapped_part := map_tensors(f, part)) is not part
    }
    if not changed_parts:
        return x
    if isinstance(x, torch.nn.utils.rnn.PackedSequence):
        return type(x)(changed_parts[0], *x[1:])
    if isinstance(x, (list, tuple)):
        mapped_items = [changed_parts.get(key, part) for key, part in parts]
        return type(x)(*mapped_items) if hasattr(x, "_fields") else type(x)(mapped_items)
    if _is_dataclass(x):
        return dataclasses.replace(x, **changed_parts)
    x = copy.copy(x)
    x.update(changed_parts)
    return x


def tensors_in(x: Any) -> list[torch.Tensor]:
    """Return the tensors in ``x``, in the order of ``map_tensors``, also of read-only mappings."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, _TENSORLESS):
        return []
    return [tensor for _, part in _parts(x) for tensor in tensors_in(part)]


def _parts(x: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of ``x`` by index, key or field, if it can be read."""
    if type(x) is dict:  # Why first: the other questions take ten times as long.
        return [*x.items()]
    # Why of the base class: whatever the class of the list or tuple says.
    if isinstance(x, list):
        return [*enumerate(list.__iter__(x))]
    if isinstance(x, tuple):
        parts = [*enumerate(tuple.__iter__(x))]
        # The other tensors of a packed sequence count the data.
        return parts[:1] if isinstance(x, torch.nn.utils.rnn.PackedSequence) else parts
    try:
        if _is_dataclass(x):
            # Why not the others: ``replace`` makes them again.
            fields = [field for field in dataclasses.fields(x) if field.init]
            return [(field.name, getattr(x, field.name)) for field in fields]
        return [*x.items()] if isinstance(x, Mapping) else ()
    except Exception:  # of any kind: it is the code of any class
        return ()


def _is_read_only(x: Any) -> bool:
    return isinstance(x, Mapping) and not (
        isinstance(x, MutableMapping) or _is_dataclass(x)
    )


def _is_dataclass(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, (type, torch.nn.Module))
