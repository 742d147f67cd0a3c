"""The leaves of a parameter tree, and the globs that name its nodes.

``read_leaves`` lists each tensor once, with all paths at which the model uses it. In a glob, ``*``
matches any part of one dotted component, and ``**`` matches any number of components.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import check_plain, did_you_mean, has_numbers, module_remedy, tree
from funcshard.plan.globs import matcher
from funcshard.plan.keys import check_container, check_paths
from funcshard.plan.unit_plan import LeafCut, Placements


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One tensor of the tree.

    Attributes:
        index: number of the tensor in the tree's order of leaves.
        paths: the paths at which the tensor is used. The first one becomes the leaf's path in the
            plan.
        tensor: the tensor; the planner reads its shape, its dtype and the marks of
            ``make_functional``.
        trainable: whether the leaf gets a gradient.
        local: the mesh axes along which its values differ.
        cuts: how it is a slice of a larger tensor along such axes, if that is known.
        placements: how it is placed, if it is a DTensor.
    """

    index: int
    paths: tuple[str, ...]
    tensor: torch.Tensor
    trainable: bool
    local: tuple[str, ...] = ()
    cuts: tuple[LeafCut, ...] = ()
    placements: Placements = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part that one rank holds."""
        if not self.placements:
            return tuple(self.tensor.shape)
        shape = list(self.tensor.shape)
        for axis, dim, ranks in self.cuts:
            assert shape[dim] % ranks == 0, (
                f"axis {axis} cuts leaf {self.paths[0]} into unequal slices"
            )
            shape[dim] //= ranks
        return tuple(shape)

    @property
    def of_module(self) -> bool:
        """Whether ``make_functional`` returned the leaf."""
        return hasattr(self.tensor, "funcshard_modules")

    def classes(self) -> Iterable[tuple[type, ...]]:
        """Return the classes of the modules around each use, as far as ``modules`` knows them."""
        marks: dict[str, tuple[type, ...]] = getattr(self.tensor, "funcshard_modules", {})
        return marks.values()

    def modules(self, path: str) -> list[tuple[str, type]]:
        """Return path and class of each module around the use at ``path``, outermost first.

        Only parameters from ``make_functional`` know their modules.
        """
        marks: dict[str, tuple[type, ...]] = getattr(self.tensor, "funcshard_modules", {})
        name = next((name for name in marks if f".{path}".endswith(f".{name}")), None)
        if name is None:
            return []
        parts, depth = path.split("."), len(name.split("."))
        above = len(parts) - depth
        return [(".".join(parts[: above + i]), cls) for i, cls in enumerate(marks[name])]


def read_leaves(params: Any, ties: Iterable[Sequence[str]]) -> tuple[tree.Structure, list[Leaf]]:
    """Return the structure of a parameter tree and its leaves, each tied tensor once.

    No leaf is local yet. The docstring of ``make_plan`` describes the arguments and the errors.
    """
    structure, tensors, uses = _merge_ties(*tree.describe(params, check_container), ties)
    for paths in uses:
        check_paths(paths)
    for tensor, paths in zip(tensors, uses, strict=True):
        _check_leaf(tensor, paths[0])
    columns = zip(uses, tensors, _trainable(tensors), strict=True)
    return structure, [Leaf(index, *column) for index, column in enumerate(columns)]


def names_in_order(params: Any, leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """Return the paths of all uses of leaves in the order of the tree as it was given.

    Parameters from ``make_functional`` come in the order of the module's state dict, and the names
    of its buffers are among them.
    """
    names: dict[str, None] = {}
    for path, leaf in tree.insertion_order(params):
        if path in names:
            continue
        marks: tuple[str, ...] = getattr(leaf, "funcshard_names", ())
        own_name = next(iter(getattr(leaf, "funcshard_modules", {})), path)
        if f".{path}".endswith(f".{own_name}"):
            above = path[: len(path) - len(own_name)]
            names.update(dict.fromkeys(above + name for name in marks))
        names[path] = None
    names.update(dict.fromkeys(path for leaf in leaves for path in leaf.paths))
    return tuple(names)


def _groups(ties: Any) -> list[tuple[str, ...]]:
    """Return groups of ties as they were passed, or raise ``TypeError``."""
    listed = isinstance(ties, Iterable) and not isinstance(
        ties, str | bytes | Mapping | torch.Tensor
    )
    groups = [
        tie_group if isinstance(tie_group, list | tuple | set | frozenset) else (None,)
        for tie_group in (ties if listed else (0,))
    ]
    if not all(isinstance(path, str) for group in groups for path in group):
        raise TypeError(
            "ties must be a list of groups of paths, such as [('embed.weight', 'head.weight')]; "
            f"found {ties!r}"
        )
    return [tuple(group) for group in groups]


def _merge_ties(
    structure: tree.Structure, leaves: list[Any], paths: list[str], ties: Iterable[Sequence[str]]
) -> tuple[tree.Structure, list[Any], list[tuple[str, ...]]]:
    """Return the structure, the distinct tensors, and the paths of all uses of each tensor."""
    named: dict[str, tuple[str, ...]] = {}  # path -> the group of ties that names it
    at = dict(zip(paths, leaves, strict=True))
    for group in _groups(ties):
        tensors = {id(at[path]) for path in group if path in at}
        if len(tensors) != 1:
            found_text = "several tensors there" if tensors else "no leaf there"
            raise ValueError(
                "each group of ties must name the paths of one tensor, and the tree must hold "
                f"this tensor under at least one of them; for {tuple(group)} found {found_text}: the "
                f"leaves are {some(paths)}"
            )
        named |= {path: tuple(group) for path in group}
    first: dict[int, int] = {}  # id of a tensor -> its number
    renumbered: dict[int, int] = {}
    kept: list[Any] = []
    uses: list[tuple[str, ...]] = []
    for i, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
        new = first.setdefault(id(leaf), len(kept))
        if new == len(kept):
            kept.append(leaf)
            uses.append((path,))
        renumbered[i] = new
        others = (*_marked_ties(leaf, path), *named.get(path, ()))
        if others or uses[new] != (path,):
            uses[new] = tuple(dict.fromkeys((*uses[new], path, *others)))
    return structure if len(kept) == len(leaves) else _renumbered(structure, renumbered), kept, uses


def _renumbered(structure: tree.Structure, new: Mapping[int, int]) -> tree.Structure:
    """Return ``structure`` with leaf ``i`` replaced by leaf ``new[i]``."""
    if structure is None or isinstance(structure, int):
        return None if structure is None else new[structure]
    node_kind, meta, children = structure
    return (node_kind, meta, tuple(_renumbered(child, new) for child in children))


def _marked_ties(leaf: Any, path: str) -> tuple[str, ...]:
    """Return the other paths of a parameter that ``make_functional`` marked as tied.

    The marks are paths in the module. If the module's parameters are a subtree of this tree, the
    paths returned begin with the path of that subtree.
    """
    marks: tuple[str, ...] = getattr(leaf, "funcshard_paths", ())
    if len(marks) < 2:
        return ()
    first, *aliases = marks
    if not f".{path}".endswith(f".{first}"):
        return ()  # no mark, or the leaf has another name in this tree than in the module
    above = path[: len(path) - len(first)]
    return tuple(above + alias for alias in aliases)


def _trainable(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, whether it gets a gradient; see ``make_plan``."""
    # Why not one rule for all: a module whose parameters are all frozen says so by requires_grad,
    # and plain tensors, as in JAX, say nothing by it unless one of them requires a gradient.
    plain = [
        not hasattr(tensor, "funcshard_modules") and not isinstance(tensor, torch.nn.Parameter)
        for tensor in tensors
    ]
    silent = not any(
        tensor.requires_grad for tensor, is_plain in zip(tensors, plain, strict=True) if is_plain
    )
    return [
        tensor.is_floating_point() or tensor.is_complex()
        if is_plain and silent
        else tensor.requires_grad
        for tensor, is_plain in zip(tensors, plain, strict=True)
    ]


def _check_leaf(leaf: Any, path: str) -> None:
    if not isinstance(leaf, torch.Tensor):
        remedy = "move it out of params, or make it a tensor"
        if isinstance(leaf, Iterator):
            remedy = "pass the params of make_functional(module), or a tree such as dict(module.named_parameters())"
        raise TypeError(
            f"leaf {path!r} must be a torch.Tensor; found {type(leaf).__name__}: "
            f"{module_remedy(leaf, 'params') or remedy}"
        )
    if leaf.is_nested or leaf.is_quantized:
        tensor_kind = "nested" if leaf.is_nested else "quantized"
        raise TypeError(
            f"leaf {path!r} is a {tensor_kind} tensor, of which no shard can be cut: hold its values, and "
            "what else it consists of, as plain tensors"
        )
    if not has_numbers(leaf.dtype):
        raise TypeError(
            f"leaf {path!r} has dtype {leaf.dtype}, which torch can neither copy nor fill "
            "everywhere: hold its bytes, leaf.view(torch.uint8), and view them inside the model"
        )
    if leaf.layout != torch.strided:
        raise TypeError(
            f"leaf {path!r} must be a dense tensor; found layout {leaf.layout}: call .to_dense() "
            "on it"
        )
    check_plain(leaf, f"leaf {path!r}")


# --- globs ----------------------------------------------------------------------------------------


def match(globs: Iterable[str], uses: Sequence[tuple[str, ...]], noun: str) -> dict[str, str]:
    """Return the nodes of a tree that paths or globs name, and for each the one that counts.

    A path counts before a glob, and a later glob before an earlier one.

    Arguments:
        globs: paths or globs.
        uses: the paths of each leaf of the tree; a tied leaf has several.
        noun: the word for a glob in error messages, such as ``"unit"``.

    Raises:
        TypeError: ``globs`` is not a list of strings.
        ValueError: a glob matches no node.
    """
    if isinstance(globs, str):
        raise TypeError(
            f"{noun}s must be a list of paths or globs; found the string {globs!r}: write "
            f"[{globs!r}]"
        )
    if not isinstance(globs, Iterable) or isinstance(globs, torch.Tensor):
        raise TypeError(
            f"{noun}s must be a list of paths or globs; found {globs!r}{policy_hint(globs)}"
        )
    globs = list(globs)
    nodes = dict.fromkeys(nodes_of(uses) if globs else [])
    chosen: dict[str, str] = {}
    for glob in globs:
        chosen |= {node: glob for node in found_by(glob, nodes, noun) if chosen.get(node) != node}
    return chosen


def last_match(globs: Iterable[str], name: str) -> str | None:
    """Return the path or glob that counts for a name, by the rule of ``match``."""
    return (
        name
        if name in globs
        else next((glob for glob in reversed([*globs]) if matches(glob, name)), None)
    )


def matches(glob: str, path: str) -> bool:
    """Return whether a path or glob matches a path."""
    return matcher(glob)(path) is not None


def nodes_of(uses: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the paths of all nodes that hold leaves, in natural order."""
    return list(_nodes_of(tuple(uses)))


@functools.lru_cache(maxsize=4)
def _nodes_of(uses: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    # Why a cache: a sweep plans one model again and again.
    keys: dict[str, tuple[Any, ...]] = {}  # the sort key of each node

    def note(node: str) -> tuple[Any, ...]:
        sort_key = keys.get(node)
        if sort_key is None:
            above, dot, last = node.rpartition(".")
            sort_key = keys[node] = (note(above) if dot else ()) + tree.natural_key(last)
        return sort_key

    for paths in uses:
        for path in paths:
            note(path)
    return tuple(sorted(keys, key=keys.__getitem__))


def policy_hint(value: Any) -> str:
    """Return the end of an error for a policy, or a class of modules, in the place of units."""
    if isinstance(value, type):
        return f": pass units=fs.wrap.by_class({value.__name__})(module)"
    return ": apply a policy to the module, as in units=policy(module)" if callable(value) else ""


def found_by(glob: Any, nodes: Collection[str], noun: str) -> list[str]:
    """Return the nodes that one glob matches; raise if there is none. The root matches itself.

    ``nodes`` is a dictionary of nodes, or another collection that finds one without a search.
    """
    if not isinstance(glob, str):
        raise TypeError(
            f"{noun}s must be a list of paths or globs; found {glob!r} in it{policy_hint(glob)}"
        )
    matched_nodes = [glob] if glob in nodes else []
    if "*" in glob:
        matched_nodes = list(filter(matcher(glob), nodes))
    if not matched_nodes and glob != "":
        above, _, last = glob.rpartition(".")
        if last.isdecimal() and above in nodes:
            remedy = f"; if {above!r} holds stacked layers, call unstack(params, {above!r}) first"
        else:
            names = (
                [re.sub(r"(?<![^.])\d+(?![^.])", "*", node) for node in nodes]
                if "*" in glob
                else nodes
            )
            # peft's modules lie under a prefix.
            deeper = next((name for name in names if name.endswith(f".{glob}")), "")
            question = (
                f"did you mean {deeper!r}?" if deeper else did_you_mean(glob, names, otherwise="")
            )
            remedy = question and f": {question}"
        raise ValueError(
            f"{noun} {glob!r} matches no part of the tree; {noun}s are paths or globs of nodes "
            f"that hold leaves, such as {some(list(nodes))}{remedy}"
        )
    return matched_nodes


def names_under(globs: Any, names: Sequence[str], option: str) -> list[str]:
    """Return the names at or below a node that one of ``globs`` matches; there may be none.

    Arguments:
        globs: paths or globs.
        names: dotted names.
        option: the option that holds the globs, for errors.

    Raises:
        TypeError: ``globs`` is not a list of strings.
    """
    given_globs = (
        list(globs) if isinstance(globs, Iterable) and not isinstance(globs, str) else [globs, None]
    )
    if not all(isinstance(glob, str) for glob in given_globs):
        raise TypeError(
            f"{option} must be a list of paths or globs; found {globs!r}: write "
            f"{option}=['experts.**']"
        )
    matchers = [matcher(glob) for glob in given_globs]
    nodes = {
        node
        for node in nodes_of((name,) for name in names)
        if any(matched(node) for matched in matchers)
    }
    return [name for name in names if not nodes.isdisjoint(tree.upwards(name))]


def some(paths: Sequence[str], most: int = 4) -> str:
    """Return the first few paths and the number of the rest, as text for an error message."""
    return ", ".join(repr(p) for p in paths[:most]) + (
        f" and {len(paths) - most} more" if len(paths) > most else ""
    )
