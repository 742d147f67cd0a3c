"""The signature of a graph, and the sizes of a batch that later calls may change."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import CodeType
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard.plan import dtype_name

Names = tuple[
    str | None, ...
]  # of each dim of a tensor; ``None`` for a dim of a fixed size


class Signature(NamedTuple):
    """The facts about the arguments of a step that a graph depends on.

    Attributes:
        modes: inference mode, and autocast with its dtype on CPU and CUDA.
        leaves: shape, dtype, device, strides and need of gradients of a tensor; ``int`` for a
            counter; type and value of others. A size that may change is its name, and such strides
            are ``None`` if contiguous.
        conditions: rules of the named sizes, which only a graph has.
    """

    form: Any
    modes: tuple[Any, ...]
    leaves: tuple[Hashable, ...]
    conditions: tuple[str, ...] = ()


def signature_of(
    leaves: Sequence[Any], form: Any, counters: int, names: Mapping[int, Any] | None = None
) -> Signature:
    """Return the signature of arguments.

    Arguments:
        counters: number of the leaves of ``state``, whose whole numbers may change.
        names: names of dims by the number of a leaf, ``None`` for a fixed size.
    """
    autocast = [
        (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        for device_type in ("cpu", "cuda")
    ]
    modes = torch.is_inference_mode_enabled(), *autocast
    leaf_facts = [_leaf_facts(leaf, i < counters) for i, leaf in enumerate(leaves)]
    for leaf_index, named_dims in (names or {}).items():
        leaf_facts[leaf_index] = _named_facts(leaves[leaf_index], named_dims)
    return Signature(form, modes, tuple(leaf_facts))


def _leaf_facts(leaf: Any, in_state: bool) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride(), leaf.requires_grad
    # Note: the number of steps is an input, a number in the batch a constant.
    if in_state and type(leaf) is int:
        return int
    try:
        hash(leaf)
    except TypeError:
        # Note: such as a set; a text tells two of them apart well enough for a recording.
        return type(leaf), repr(leaf)
    # Why the type: 1, 1.0 and True are equal, and compute different dtypes.
    return type(leaf), leaf


def _named_facts(tensor: torch.Tensor, names: Sequence[str | None]) -> Hashable:
    shape = tuple([name or size for name, size in zip(names, tensor.shape, strict=True)])
    strides = (
        None if tensor.stride() == contiguous_strides(tensor.shape) else tensor.stride()
    )
    return shape, tensor.dtype, tensor.device, strides, tensor.requires_grad


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def sized(leaf: Any, sizes: Mapping[str, int]) -> Any:
    """Return the facts about a tensor, with numbers in place of names."""
    shape, dtype, device, strides, requires_grad = leaf
    # Note: a number has no name, so it is its own size.
    shape = torch.Size([sizes.get(size, size) for size in shape])
    if strides is None:
        strides = contiguous_strides(shape)
    return shape, dtype, device, strides, requires_grad


# --- sizes with names -----------------------------------------------------------------------------


class NamedSizes:
    """The names that ``trace(dynamic_shapes=...)`` gives to dims of the batch.

    ``spec`` is that argument; ``None`` gives no names.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        # By form of the arguments: the text of each leaf.
        self._known_texts: dict[Any, dict[int, str]] = {}

    def of(self, leaves: Sequence[Any], form: Any) -> dict[int, Names]:
        """Return the names of dims by leaf of ``(state, batch)``."""
        if self.spec is None:
            return {}
        # Why kept: the next batches have this form too, and each call asks.
        text_of_leaf = self._known_texts.get(form)
        if text_of_leaf is None:
            _, batch = tree.build_form(form, range(form.num_leaves))
            text_of_leaf = self._known_texts[form] = dict(
                _spread(self.spec, batch, "batch")
            )
        return {
            leaf_index: _names(dims_text, leaves[leaf_index])
            for leaf_index, dims_text in text_of_leaf.items()
            if isinstance(leaves[leaf_index], torch.Tensor)
        }


def _spread(spec: Any, batch: Any, path: str) -> Iterator[tuple[int, str]]:
    """Yield the text for each leaf of a batch."""
    if spec is None:
        return
    if isinstance(spec, str):
        yield from dict.fromkeys(tree.leaves(batch), spec).items()
        return
    keys = _keys(spec)
    if keys is None or keys != _keys(batch):
        raise ValueError(
            "dynamic_shapes has the form of the batch, with a text such as 'b, ...' or None for each "
            f"part; found another form at `{path}`"
        )
    for key in keys:
        yield from _spread(spec[key], batch[key], f"{path}[{key!r}]")


def _keys(part: Any) -> Any:
    """Return the keys of a container; ``None`` for a leaf."""
    if isinstance(part, Mapping):
        return part.keys()
    return range(len(part)) if isinstance(part, tuple | list) else None


def _names(text: str, tensor: torch.Tensor) -> Names:
    """Return the name of each dim of a tensor."""
    dim_names = [part.strip() for part in text.split(",")]
    has_more = dim_names[-1] == "..."
    if has_more:
        dim_names.pop()
    for name in dim_names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(
                "dynamic_shapes names the sizes that may change: 'b, ...' for dim 0, 'b, t' for "
                "two dims, with _ for a fixed one and ... at the end for all further ones; found "
                f"{text!r}"
            )
    more_count = tensor.ndim - len(dim_names)
    if more_count < 0 or (more_count and not has_more):
        raise ValueError(
            f"dynamic_shapes={text!r} names {len(dim_names)} dims; found a tensor of shape "
            f"{list(tensor.shape)} in the batch: pass a tree of texts in the form of the batch, "
            "with None for tensors of fixed shapes, and '...' for further dims"
        )
    return tuple(None if name == "_" else name for name in dim_names + ["_"] * more_count)


def sizes_of(leaves: Sequence[Any], names: Mapping[int, Names]) -> dict[str, int]:
    """Return the size of each name in the leaves; raise ``ValueError`` if two differ."""
    sizes_by_name = dict[str, int]()
    for leaf_index, named_dims in names.items():
        for name, size in zip(named_dims, leaves[leaf_index].shape, strict=True):
            if name is not None and sizes_by_name.setdefault(name, size) != size:
                raise ValueError(
                    f"dynamic_shapes gives the name {name!r} to dims of one size; found the sizes "
                    f"{sizes_by_name[name]} and {size} in the batch: give them two names"
                )
    return sizes_by_name


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return sizes as text, such as ``b = 4, t = 16``."""
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


# --- conditions -----------------------------------------------------------------------------------

# All that a condition may consist of, besides names, numbers and calls of these functions.
_ARITHMETIC = (
    ast.Expression, ast.Name, ast.Load, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Div,
    ast.UnaryOp, ast.Not, ast.USub, ast.BoolOp, ast.And, ast.Or,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
_FUNCTIONS = {"min": min, "max": max, "abs": abs, "float": float, "int": int}
_LONGEST = 2000  # characters; a condition of torch has some dozens


@dataclass(frozen=True, slots=True)
class Conditions:
    """Comparisons that the sizes of a batch have to fulfil.

    Attributes:
        texts: the conditions as Python code, such as ``"b % 2 == 0"``.
    """

    texts: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    _codes: tuple[CodeType, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_codes", tuple(map(_compiled, self.texts)))

    def failing(self, sizes: Mapping[str, int]) -> str:
        """Return the first condition that sizes don't fulfil, with its place, or ``""``."""
        # Why no builtins: eval would add all of them, __import__ too.
        known_values = {"__builtins__": {}, **sizes}
        known_values |= {f"{name}()": function for name, function in _FUNCTIONS.items()}
        for text, place, code in zip_longest(
            self.texts, self.places, self._codes, fillvalue=""
        ):
            if not eval(code, known_values):
                return f"{text} ({place})" if place else text
        return ""


def _compiled(text: str) -> CodeType:
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters")
        parsed_text = ast.parse(text, mode="eval")
        for node in ast.walk(parsed_text):
            # Why: a file must not run other code than arithmetic.
            _check_node(node)
        return compile(parsed_text, "<condition>", "eval", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(
            f"found the condition {text[:60]!r}, which isn't a comparison of sizes: {error}"
        ) from None


def _check_node(node: ast.AST) -> None:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float, bool):
            pass
        case ast.Call(func=ast.Name(id=name) as func, args=[_, *_], keywords=[]) if (
            name in _FUNCTIONS
        ):
            func.id = f"{name}()"  # because a size may have the name of a function
        case _ if not isinstance(node, _ARITHMETIC):
            raise ValueError(type(node).__name__)


# --- differences as text --------------------------------------------------------------------------


def nearest_difference(found: Signature, recorded: Iterable[Signature]) -> str:
    """Return how arguments differ from the nearest of several signatures.

    It names one difference, ``leaf `batch[0]`: recorded float32[4], found float32[5]``, and the
    number of others.
    """

    def distance(each: Signature) -> tuple[bool, int]:
        return each.form != found.form, len(_differences(each, found))

    first_text, *other_texts = _differences(min(recorded, key=distance), found) or [""]
    return f"{first_text}, and {len(other_texts)} more" if other_texts else first_text


def _differences(recorded: Signature, found: Signature) -> list[str]:
    old_paths, new_paths = (
        dict.fromkeys(paths_of(recorded.form)),
        dict.fromkeys(paths_of(found.form)),
    )
    if recorded.form != found.form:
        texts = [
            f"the tree has the new leaf `{path}`"
            for path in new_paths
            if path not in old_paths
        ]
        texts += [
            f"the tree lacks the leaf `{path}`"
            for path in old_paths
            if path not in new_paths
        ]
        return texts or ["the tree has the same leaves in containers of other types"]
    mode_names = ("inference mode", "autocast on the CPU", "autocast on CUDA")
    names = [*mode_names, *(f"leaf `{path}`" for path in new_paths)]
    old_facts, new_facts = ((*each.modes, *each.leaves) for each in (recorded, found))
    texts = []
    for name, *facts in zip(names, old_facts, new_facts, strict=True):
        for old_text, new_text in zip_longest(
            *map(_fact_texts, facts), fillvalue="nothing"
        ):
            if old_text != new_text:
                texts.append(f"{name}: recorded {old_text}, found {new_text}")
                break
    # Why the batch first: other shapes of a batch are the usual reason.
    return sorted(texts, key=lambda text: not text.startswith("leaf `batch"))


def paths_of(form: Any) -> list[str]:
    """Return the path of each leaf of ``(state, batch)``."""
    state, batch = tree.build_form(form, range(form.num_leaves))
    return tree.code_paths(state, "state") + tree.code_paths(batch, "batch")


def _fact_texts(fact: Any) -> list[str]:
    """Return a mode or a leaf as texts."""
    if isinstance(fact, bool):
        return ["on" if fact else "off"]
    if fact is int:
        return ["a counter"]
    if len(fact) == 2:
        first, value = fact
        if isinstance(first, bool):
            return [f"{'on' if first else 'off'} with {dtype_name(value)}"]
        return [f"{first.__name__} {value!r}"]
    shape, dtype, device, stride, requires_grad = fact
    return [
        f"{dtype_name(dtype)}[{', '.join(map(str, shape))}]",
        f"on {device}",
        "contiguous" if stride is None else f"strides {list(stride)}",
        "a gradient" if requires_grad else "no gradient",
    ]
