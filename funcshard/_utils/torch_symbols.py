"""Record graphs in which some sizes of the inputs are symbols, so that one graph serves all sizes.

This file uses torch's private API as ``torch_private`` does. Its imports of ``sympy`` are inside
functions, because they take long.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from funcshard._utils.torch_names import needed_for
from funcshard._utils.torch_private import FakeTensorMode, record_graph

_FEATURE = "a trace for any size"

Names = Sequence[str | None]  # of each dim of a tensor; ``None`` for a dim of a fixed size


def record_sized_graph(
    function: Callable[..., Any], examples: Sequence[torch.Tensor], names: Sequence[Names]
) -> tuple[fx.Graph, dict[str, torch.Tensor], list[tuple[str, str]]]:
    """Return a graph as ``record_graph`` does, for tensors whose named dims may have other sizes.

    All numbers that depend on sizes are computed at the start of the graph, from the sizes of its
    inputs.

    Arguments:
        function: a function from tensors to a list of tensors and numbers.
        examples: the tensors to call it with; it gets tensors like these, without data.
        names: for each example a name for each of its dims, or nothing.

    Returns:
        The graph, its constants, and the conditions on the sizes: for each of them its text,
        such as ``"b % 2 == 0"``, and the place of the Python code that made it.

    Raises:
        ValueReadError: Python code of ``function`` depends on the value of a tensor.
    """
    with needed_for(_FEATURE):
        from torch._functorch import config
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv(duck_shape=False)  # two names with one size are two symbols
    # Why: asking for the address of a tensor without data is an error then, as in record_graph.
    with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    pairs = list(zip(examples, names, strict=True))
    fakes = [
        _fake(mode, tensor, size_names, f"input{input_index}")
        for input_index, (tensor, size_names) in enumerate(pairs)
    ]
    dims = [
        (input_index, dim, name)
        for input_index, size_names in enumerate(names)
        for dim, name in enumerate(size_names)
        if name is not None
    ]
    symbols = [
        (_expression(fakes[input_index].shape[dim]), name) for input_index, dim, name in dims
    ]
    with mode:
        graph, constants = record_graph(function, fakes, tracing_mode="real")
    strides = [
        pair
        for fake, (tensor, size_names) in zip(fakes, pairs, strict=True)
        if any(size_names)
        for pair in _strides(fake, tensor)
    ]
    placeholders = graph.find_nodes(op="placeholder")
    _compute_sizes_first(
        graph,
        {_expression(fakes[n].shape[dim]): (placeholders[n], dim) for n, dim, _ in reversed(dims)},
    )
    return graph, constants, _conditions(env, symbols, strides)


def _fake(mode: Any, tensor: torch.Tensor, names: Names, source: str) -> torch.Tensor:
    """Return a tensor without data, whose named sizes are symbols."""
    with needed_for(_FEATURE):
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if not any(name is not None for name in names):
        # Why no source: the number in a tensor of no dims would become a size.
        fixed: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
        return fixed
    sizes = [DimDynamic.STATIC if name is None else DimDynamic.DYNAMIC for name in names]
    with FakeTensorMode():  # a view of other memory has symbols for that, too
        alone = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        alone.requires_grad_(tensor.requires_grad)
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    fake_tensor: torch.Tensor = mode.from_tensor(
        alone, symbolic_context=context, source=ConstantSource(source)
    )
    return fake_tensor


def _expression(size: Any) -> Any:
    """Return the sympy expression of a size."""
    import sympy

    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


# --- conditions -----------------------------------------------------------------------------------


def _strides(fake: torch.Tensor, tensor: torch.Tensor) -> list[tuple[Any, int]]:
    """Return the strides of a tensor as symbols and as numbers; none for a contiguous one."""
    if tensor.is_contiguous():
        return []
    return [
        (_expression(fake_stride), real_stride)
        for fake_stride, real_stride in zip(fake.stride(), tensor.stride(), strict=True)
    ]


def _conditions(
    env: Any, symbols: Sequence[tuple[Any, str]], strides: Sequence[tuple[Any, int]]
) -> list[tuple[str, str]]:
    """Return what sizes have to fulfil for the recording to be that of other sizes too.

    Arguments:
        env: torch's record of all symbols.
        symbols: the symbol of each named size.
        strides: strides that stay as they are, as symbols and as numbers.
    """
    import sympy

    named = {
        symbol: sympy.Symbol(name, integer=True, positive=True)
        for symbol, name in symbols
        if symbol.is_Symbol
    }
    known_values = named | {
        symbol: sympy.Integer(stride)
        for symbol, stride in strides
        if symbol.is_Symbol and symbol not in named
    }
    places: dict[str, str] = {}  # the place of each condition, by its text
    for symbol, name in symbols:  # a size of 0 or 1 is no symbol
        if symbol.is_Integer:
            places[f"{name} == {symbol}"] = "torch gives sizes 0 and 1 graphs of their own"
    for guard in env.guards:
        expression = guard.expr.xreplace(known_values)
        if not _is_bound(guard.expr) and expression not in (sympy.true, True):
            places.setdefault(_text(expression), _place(guard.sloc.framework_loc))
    for expression, stride in strides:
        if named.keys() & expression.free_symbols:
            text = f"{_text(expression.xreplace(known_values))} == {stride}"
            places.setdefault(text, "the strides of the batch")
    for symbol, name in named.items():
        # Why not below 2: torch gives sizes 0 and 1 graphs of their own.
        bounds = env.var_to_range[symbol]
        if bounds.lower == bounds.upper:
            continue
        places.setdefault(f"{name} >= {max(2, int(bounds.lower))}", "torch")
        if bounds.upper.is_Integer and int(bounds.upper) < sys.maxsize - 1:
            places.setdefault(f"{name} <= {bounds.upper}", "torch")
    return list(places.items())


def _is_bound(expression: Any) -> bool:
    """Return whether a condition compares one symbol with one number, as its range does."""
    import sympy

    if not isinstance(expression, sympy.Rel) or isinstance(expression, sympy.Eq | sympy.Ne):
        return False
    left_side, right_side = expression.args
    return (left_side.is_Symbol and right_side.is_Integer) or (
        left_side.is_Integer and right_side.is_Symbol
    )


def _place(frame: Any) -> str:
    """Return where Python code asked for a size."""
    return (
        f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        if hasattr(frame, "filename")
        else str(frame or "torch")
    )


def _text(expression: Any) -> str:
    """Return a condition as Python code."""
    with needed_for(_FEATURE):
        from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(expression))


# --- numbers of a graph ---------------------------------------------------------------------------


def _compute_sizes_first(graph: fx.Graph, sizes: Mapping[Any, tuple[fx.Node, int]]) -> None:
    """Let a graph compute each number that depends on sizes once, at its start, from its inputs.

    A recording takes sizes from intermediate results, whose memory would be needed for longer.

    Arguments:
        graph: the graph.
        sizes: for the expression of each symbol an input, and its dim of that size.
    """
    import sympy

    size_nodes: dict[Any, fx.Node] = {}
    first = next(node for node in graph.nodes if node.op != "placeholder")

    def add(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    def built(expression: Any) -> fx.Node | int:
        if expression.is_Integer:
            return int(expression)
        if expression not in size_nodes:
            size_nodes[expression] = made(expression)
        return size_nodes[expression]

    def joined(target: Any, parts: Iterable[Any]) -> Any:
        joined_node, *other_nodes = [built(part) for part in parts]
        for other_node in other_nodes:
            joined_node = add(target, joined_node, other_node)
        return joined_node

    def made(expression: Any) -> Any:
        if expression in sizes:
            return add(torch.ops.aten.sym_size.int, *sizes[expression])
        name = type(expression).__name__
        if name in ("Add", "Mul"):
            return joined(operator.add if name == "Add" else operator.mul, expression.args)
        if name in ("FloorDiv", "CleanDiv", "Mod", "PythonMod"):
            target = operator.mod if name.endswith("Mod") else operator.floordiv
            return joined(target, expression.args)
        if name == "Pow" and expression.args[1].is_Integer and int(expression.args[1]) > 1:
            return joined(operator.mul, [expression.args[0]] * int(expression.args[1]))
        raise LookupError(name)

    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt):
            continue
        expression = value.node.expr
        if not expression.free_symbols <= {
            size for size in sizes if isinstance(size, sympy.Symbol)
        }:
            continue
        with graph.inserting_before(first), contextlib.suppress(LookupError):
            size_node = built(expression)
            node.replace_all_uses_with(size_node) if isinstance(size_node, fx.Node) else put_number(
                node, size_node
            )
            if node is first:
                first = node.next
            graph.erase_node(node)


def put_number(node: fx.Node, number: Any) -> None:
    """Let the users of a node use a number in its place."""
    for user in list(node.users):
        user.args = fx.node.map_arg(user.args, lambda each: number if each is node else each)
        user.kwargs = fx.node.map_arg(user.kwargs, lambda each: number if each is node else each)
