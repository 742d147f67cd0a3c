"""Compile graphs of torch's operators with torch's compilers, below Dynamo.

Compilers take seconds to import, so each function imports its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from funcshard._utils.torch_private import FakeTensorMode

# A function that empties its list, so that each input is freed at its last use.
Boxed = Callable[[list[Any]], Sequence[Any]]


@contextlib.contextmanager
def _compiling() -> Iterator[Any]:
    """Set what torch's compilers expect around them; yield the mode of fake tensors."""
    from torch._guards import TracingContext, tracing
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with torch.no_grad(), tracing(TracingContext(fake_mode)):
        yield fake_mode


def _fake_like(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )


def find_backend(backend: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Return the function of a backend's name, but for ``"inductor"``.

    Raises:
        ValueError: no backend has this name.
    """
    if not isinstance(backend, str) or backend == "inductor":
        return backend
    from torch._dynamo.backends.registry import lookup_backend

    if backend not in torch.compiler.list_backends(exclude_tags=()):
        raise ValueError(
            "compile takes the name of a backend of torch.compile, or a function; found "
            f"{backend!r}: torch.compiler.list_backends() lists the names"
        )
    compile_function: Callable[..., Any] = lookup_backend(backend)
    return compile_function


def compile_with(
    backend: Callable[..., Any], module: torch.fx.GraphModule, like: Sequence[torch.Tensor]
) -> Boxed:
    """Compile a module of torch's operators with a backend of ``torch.compile``.

    Arguments:
        backend: a function from a module and inputs without data to a function.

    Raises:
        TypeError: the backend returns no function.
    """
    with _compiling() as fake_mode:
        run = backend(module, [_fake_like(fake_mode, tensor) for tensor in like])
    if not callable(run):
        raise TypeError(
            f"a backend returns a function; found {type(run).__name__} for a region of "
            f"{len(module.graph.nodes)} operations: return module.forward to run it as it is"
        )

    return _boxed(run)


def _boxed(run: Callable[..., Sequence[Any]]) -> Boxed:
    """Return a function of several inputs as one of a list, which it empties."""

    def boxed(inputs: list[Any]) -> Sequence[Any]:
        input_values = tuple(inputs)
        inputs.clear()
        return run(*input_values)

    return boxed


def inductor(module: torch.fx.GraphModule, like: Sequence[torch.Tensor]) -> Boxed:
    """Compile a module of torch's operators with Inductor, without Dynamo and autograd.

    The result doesn't check its inputs.

    Arguments:
        module: a module that returns a list of tensors, and may write to its inputs.
        like: tensors of the inputs' form. No two inputs may share memory.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    pure_function: Any = torch.func.functionalize(
        lambda *inputs: module(*inputs), remove="mutations"
    )
    inductor_options = {
        "size_asserts": False,
        "nan_asserts": False,
        "alignment_asserts": False,
    }
    with (
        _compiling() as fake_mode,
        V.set_fake_mode(fake_mode),
        config.patch(inductor_options),
    ):
        examples = [_fake_like(fake_mode, tensor) for tensor in like]
        traced_module = make_fx(pure_function, decomposition_table=select_decomp_table())(
            *examples
        )
        traced_module = joint_graph_passes(traced_module)
        (output_node,) = [node for node in traced_module.graph.nodes if node.op == "output"]
        if not isinstance(output_node.args[0], tuple | list):
            output_node.args = ((output_node.args[0],),)
        # Why: Inductor keeps the strides of such outputs alone.
        output_node.meta["user_visible_output_idxs"] = list(range(len(output_node.args[0])))
        compiled_graph: Any = compile_fx_inner(traced_module, examples, is_inference=True)
    # Why: its own __call__ looks for profilers and caches of GPU kernels.
    run: Boxed = getattr(compiled_graph, "current_callable", None) or compiled_graph
    return run if getattr(compiled_graph, "_boxed_call", True) else _boxed(run)
