"""Record graphs in which some sizes of the inputs are symbols.

Importing ``sympy`` takes long, so functions do it.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from funcshard._utils.torch_private import FakeTensorMode, record_graph

Names = Sequence[str | None]  # of each dim of a tensor; ``None`` for a dim of a fixed size


def record_sized_graph(
    function: Callable[..., Any], examples: Sequence[torch.Tensor], names: Sequence[Names]
) -> tuple[fx.Graph, dict[str, torch.Tensor], list[tuple[str, str]]]:
    """Return a graph as ``record_graph`` does, for other sizes of named dims too.

    It computes all numbers that depend on sizes at its start.

    Arguments:
        function: a function from tensors to a list of tensors and numbers.
        names: for each example a name for each dim, or nothing.

    Returns:
        The graph, its constants, and the conditions on sizes: text, such as ``"b % 2 == 0"``, and
        the place of the code that made it.

    Raises:
        ValueReadError: Python code of ``function`` depends on the value of a tensor.
    """
    from torch._functorch import config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shape_env = ShapeEnv(duck_shape=False)  # two names with one size are two symbols
    # Why: asking for the address of a tensor without data is an error then, as in record_graph.
    with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    fakes = [
        _fake(fake_mode, tensor, size_names, f"input{input_index}")
        for input_index, (tensor, size_names) in enumerate(
            zip(examples, names, strict=True)
        )
    ]
    # Note: before the recording, in which a symbol may turn out to have one value only.
    symbols = [
        (_expression(size), name)
        for fake, size_names in zip(fakes, names, strict=True)
        for size, name in zip(fake.shape, size_names, strict=False)
        if name is not None
    ]
    with fake_mode:
        graph, constants = record_graph(function, fakes, tracing_mode="real")
    placeholders = graph.find_nodes(op="placeholder")
    size_sources: dict[Any, tuple[fx.Node, int]] = {}
    fixed_strides: list[tuple[Any, int]] = []  # of tensors that are not contiguous
    for input_index, (fake, size_names) in enumerate(zip(fakes, names, strict=True)):
        example = examples[input_index]
        for dim, name in enumerate(size_names):
            if name is not None:
                size = _expression(fake.shape[dim])
                size_sources.setdefault(size, (placeholders[input_index], dim))
        if any(size_names) and not example.is_contiguous():
            fixed_strides += zip(
                map(_expression, fake.stride()), example.stride(), strict=True
            )
    _compute_sizes_first(graph, size_sources)
    return graph, constants, _conditions(shape_env, symbols, fixed_strides)


def _fake(mode: Any, tensor: torch.Tensor, names: Names, source: str) -> torch.Tensor:
    """Return a fake tensor whose named sizes are symbols."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if not any(name is not None for name in names):
        # Why no source: the number in a tensor of no dims would become a size.
        fixed_tensor: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
        return fixed_tensor
    kinds = DimDynamic.DYNAMIC, DimDynamic.STATIC
    dynamic_sizes = [kinds[name is None] for name in names]
    with FakeTensorMode():  # a view of other memory has symbols for that, too
        own_memory = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        own_memory.requires_grad_(tensor.requires_grad)
    context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic_sizes)
    fake_tensor: torch.Tensor = mode.from_tensor(
        own_memory, symbolic_context=context, source=ConstantSource(source)
    )
    return fake_tensor


def _expression(size: Any) -> Any:
    import sympy

    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.Integer(size)


# --- conditions -----------------------------------------------------------------------------------


def _conditions(
    env: Any, symbols: Sequence[tuple[Any, str]], strides: Sequence[tuple[Any, int]]
) -> list[tuple[str, str]]:
    """Return what sizes have to fulfil for the recording to serve them.

    Arguments:
        strides: fixed strides, as symbols and as numbers.
    """
    import sympy

    named_symbols = {
        symbol: sympy.Symbol(name, integer=True, positive=True)
        for symbol, name in symbols
        if symbol.is_Symbol
    }
    known_values = {
        symbol: sympy.Integer(n) for symbol, n in strides if symbol.is_Symbol
    } | named_symbols
    condition_places: dict[str, str] = {}  # the place of each condition, by its text
    for symbol, name in symbols:  # a size of 0 or 1 is no symbol
        if symbol.is_Integer:
            condition_places[f"{name} == {symbol}"] = (
                "torch gives sizes 0 and 1 separate graphs"
            )
    for guard in env.guards:
        expression = guard.expr.xreplace(known_values)
        if not _is_bound(guard.expr) and expression not in (sympy.true, True):
            condition_places.setdefault(_text(expression), _place(guard.sloc.framework_loc))
    for expression, stride in strides:
        if named_symbols.keys() & expression.free_symbols:
            stride_text = f"{_text(expression.xreplace(known_values))} == {stride}"
            condition_places.setdefault(stride_text, "the strides of the batch")
    for symbol, name in named_symbols.items():
        # Why not below 2: torch gives sizes 0 and 1 separate graphs.
        symbol_range = env.var_to_range[symbol]
        if symbol_range.lower == symbol_range.upper:
            continue
        condition_places.setdefault(f"{name} >= {max(2, int(symbol_range.lower))}", "torch")
        if symbol_range.upper.is_Integer and int(symbol_range.upper) < sys.maxsize - 1:
            condition_places.setdefault(f"{name} <= {symbol_range.upper}", "torch")
    return list(condition_places.items())


def _is_bound(expression: Any) -> bool:
    """Return whether a condition compares one symbol with one number."""
    import sympy

    if not isinstance(expression, sympy.Rel) or isinstance(expression, sympy.Eq | sympy.Ne):
        return False
    kinds = {(side.is_Symbol, side.is_Integer) for side in expression.args}
    return kinds == {(True, False), (False, True)}


def _place(frame: Any) -> str:
    if hasattr(frame, "filename"):
        return f"{os.path.basename(frame.filename)}, line {frame.lineno}"
    return str(frame or "torch")


def _text(expression: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(expression))


# --- numbers of a graph ---------------------------------------------------------------------------


def _compute_sizes_first(graph: fx.Graph, sizes: Mapping[Any, tuple[fx.Node, int]]) -> None:
    """Let a graph compute each number of sizes once, at its start.

    Arguments:
        sizes: an input and its dim for the expression of each symbol.
    """
    import sympy

    size_nodes: dict[Any, fx.Node] = {}
    known_symbols = {size for size in sizes if isinstance(size, sympy.Symbol)}
    # Why first: a recording takes sizes from intermediate results, whose memory would live longer.
    first_node = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt):
            continue
        expression = value.node.expr
        if not expression.free_symbols <= known_symbols:
            continue
        # LookupError: a function of sizes that is rare, which stays where it is.
        with graph.inserting_before(first_node), contextlib.suppress(LookupError):
            size_node = _size_node(graph, expression, sizes, size_nodes)
            if isinstance(size_node, fx.Node):
                node.replace_all_uses_with(size_node)
            else:
                put_number(node, size_node)
            if node is first_node:
                first_node = node.next
            graph.erase_node(node)


_TARGETS = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}


def _size_node(
    graph: fx.Graph,
    expression: Any,
    sizes: Mapping[Any, tuple[fx.Node, int]],
    size_nodes: dict[Any, fx.Node],
) -> fx.Node | int:
    """Return the node of an expression of sizes; ``size_nodes`` keeps all."""
    if expression.is_Integer:
        return int(expression)
    if expression in size_nodes:
        return size_nodes[expression]
    if expression in sizes:
        size_node: Any = graph.call_function(torch.ops.aten.sym_size.int, sizes[expression])
    else:
        name, args = type(expression).__name__, expression.args
        if name == "Pow" and args[1].is_Integer and int(args[1]) > 1:
            name, args = "Mul", [args[0]] * int(args[1])
        operator_target = _TARGETS[name]
        size_node, *other_nodes = [
            _size_node(graph, arg, sizes, size_nodes) for arg in args
        ]
        for other_node in other_nodes:
            size_node = graph.call_function(operator_target, (size_node, other_node))
    size_nodes[expression] = size_node
    return size_node


def put_number(node: fx.Node, number: Any) -> None:
    """Let the users of a node use a number in its place."""
    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg(
            (user.args, user.kwargs),
            lambda argument: number if argument is node else argument,
        )
