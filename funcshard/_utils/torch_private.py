"""Uses of torch's private API, so that a new torch release is checked against few files.

torch has no public name for the facts and switches below. Names that start with an underscore may
change in any torch release, and ruff's rule SLF001 keeps them out of all other files.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch._functorch import eager_transforms
from torch._functorch.eager_transforms import jvp_increment_nesting
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from funcshard._utils.tensors import byte_view

__all__ = [
    "BasisLoop",
    "ValueReadError",
    "address",
    "basis_loops",
    "belongs_to_transform_above",
    "callers_level",
    "cuda_sleep",
    "dcp_storage_info",
    "dispatch_modes",
    "fake_tensors",
    "graph_task_id",
    "hidden_from_dynamo",
    "in_selective_checkpoint",
    "is_compiled_in_place",
    "is_fake",
    "is_legacy_batched",
    "is_transformed",
    "is_zero_tensor",
    "local_part",
    "next_sequence_number",
    "no_torch_function",
    "one_forward_level",
    "cast_of",
    "outer_saved_tensors_hooks",
    "record_graph",
    "recording_graph",
    "recording_or_transforming",
    "refresh_flat_weights",
    "running_sequence_number",
    "same_storage",
    "saved_tensors_hooks_allowed",
    "transform_level",
    "unwrapped",
    "unwrapped_bytes",
    "sequence_number",
    "signed",
    "storage_id",
    "stored_parts",
    "transforms_active",
    "unseen",
    "untraced",
    "version",
    "without_torch_function",
    "wrapper_subclass",
]

P = ParamSpec("P")
T = TypeVar("T")

# --- torch.func transforms ------------------------------------------------------------------------

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether this code runs inside a ``torch.func`` transform."""

is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Return whether a ``torch.func`` transform wraps the tensor."""

is_legacy_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Return whether the tensor is a batch of ``torch.autograd.grad(is_grads_batched=True)``."""


def belongs_to_transform_above(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` belongs to a transform that does not run here.

    That is the case if code below the transform captured the tensor.
    """
    functorch = torch._C._functorch
    level = functorch.maybe_get_level(tensor)
    stack = functorch.get_interpreter_stack() or []
    if level > len(stack):
        return True
    # Why compare kinds: a transform that was opened here can have the same level as one above.
    mapped = level > 0 and stack[level - 1].key() == functorch.TransformType.Vmap
    return level > 0 and functorch.is_batchedtensor(tensor) != mapped


@contextlib.contextmanager
def one_forward_level() -> Iterator[None]:
    """Open torch's level of forward-mode differentiation for the ``with`` block, unless it is open.

    torch has one such level for the whole process, and threads cannot each enter it. With the level
    open, a ``torch.func.jvp`` in any thread uses it instead of entering it.
    """
    if forward_ad._current_level >= 0:
        yield
        return
    with jvp_increment_nesting(), forward_ad.dual_level():
        yield


def transform_level() -> int:
    """Return the number of ``torch.func`` transforms that this code runs inside."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor below all transforms that wrap ``tensor``."""
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def unwrapped_bytes(tensor: torch.Tensor) -> bytes:
    """Return the data of ``tensor``, below all transforms that wrap it."""
    tensor = unwrapped(tensor)
    with temporarily_clear_interpreter_stack(), torch.no_grad():
        return bytes(byte_view(tensor.cpu()).tolist())


# --- loops over unit vectors ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class BasisLoop:
    """A call of torch that differentiates along one unit vector after another.

    Attributes:
        name: the function that was called.
        arguments: the tensors whose elements give the unit vectors; for reverse mode, where these
            are the function's outputs, none.
    """

    name: str
    arguments: tuple[torch.Tensor, ...] = ()


def basis_loops(bottom: CodeType | None = None, *, outer: bool = False) -> dict[int, BasisLoop]:
    """Return the loops over unit vectors whose function runs here, by the level of their transform.

    Level 0 is ``torch.autograd.functional``, which uses no transform.

    Arguments:
        bottom: the code of a function that runs below all transforms of its callers.
        outer: whether to leave out the innermost loop of level 0.
    """
    # Why look at frames: the tensors inside jacrev are those inside vmap of vjp, where the caller
    # has chosen the vectors.
    found: dict[int, BasisLoop] = {}
    frame: Any = sys._getframe(1)
    callee, opened, functional_file, at_bottom = "", None, torch.autograd.functional.__file__, False
    while frame is not None:
        code = frame.f_code
        at_bottom = at_bottom or code is bottom
        if at_bottom and code.co_filename != functional_file:
            pass
        elif code.co_filename == eager_transforms.__file__:
            if code.co_name in ("_jvp_with_argnums", "_vjp_with_argnums"):
                opened = frame.f_locals
            elif opened is not None:
                if code.co_qualname == "jacrev.<locals>.wrapper_fn":
                    found[opened["level"]] = BasisLoop("torch.func.jacrev")
                elif code.co_qualname == "jacfwd.<locals>.wrapper_fn.<locals>.push_jvp":
                    found[opened["level"]] = BasisLoop("torch.func.jacfwd", opened["flat_primals"])
                opened = None
        # Why not in its own backward: that one runs once for each unit vector, and the collectives
        # that it records belong to the caller.
        elif code.co_name == "jacobian" and code.co_filename == functional_file and callee != "_autograd_grad":
            if not outer:
                found[0] = BasisLoop("torch.autograd.functional.jacobian")
            outer = False
        callee, frame = code.co_name, frame.f_back
    return found


# --- autograd -------------------------------------------------------------------------------------

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward that runs on this thread, or -1 if none does."""

saved_tensors_hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
"""Return whether ``torch.autograd.graph.saved_tensors_hooks`` is allowed here."""


def outer_saved_tensors_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the innermost active pair of saved-tensor hooks, or ``None``."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


_TRANSPOSES = ("TBackward0", "TransposeBackward0", "PermuteBackward0")


def cast_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Any, int, bool] | None:
    """Return what ``tensor`` is a cast of, such as one of autocast, if the autograd graph tells.

    Returns:
        The whole cast, of which ``tensor`` may be a view; the autograd node of the source and the
        number of its output; and whether the source was transposed before the cast. ``None`` if
        ``tensor`` is no cast, or was written to after it.
    """
    cast = tensor._base if tensor._is_view() else tensor
    node = None if cast is None else cast.grad_fn
    if cast is None or node is None or node.name() != "ToCopyBackward0" or cast._version:
        return None
    source, number = node.next_functions[0]
    if source is None or source.name() not in _TRANSPOSES:
        return cast, source, number, False
    source, number = source.next_functions[0]
    return cast, source, number, True


def sequence_number(node: Any) -> int:
    """Return the sequence number of an autograd node; forward numbers its nodes upwards."""
    return int(node._sequence_nr())


def signed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Store the signature of an autograd Function's ``forward`` on it, and return it.

    Its arguments must have no defaults.
    """
    # Why: at every call, Function.apply computes the signature of forward and binds the arguments
    # to it, to fill in defaults. That takes longer than the rest of a small unit. Python finds a
    # stored signature at once (PEP 362), and without defaults there is nothing to bind.
    assert all(p.default is inspect.Parameter.empty for p in inspect.signature(forward).parameters.values())
    forward.__signature__ = _Positional.from_callable(forward)  # type: ignore[attr-defined]
    return forward


class _Positional(inspect.Signature):
    """A signature whose ``bind`` does not check the arguments; the call itself does."""

    def bind(self, *args: Any, **kwargs: Any) -> _Bound:  # type: ignore[override]
        return _Bound(args, kwargs)


class _Bound:
    __slots__ = ("args", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def apply_defaults(self) -> None:
        """Do nothing: there are no defaults."""


# --- selective checkpoints ------------------------------------------------------------------------

# The dispatch modes of torch's selective checkpoints. In forward the first keeps the results of
# operations that a policy names. In the recomputation the second returns these results.
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of dispatch modes that are active here."""


def in_selective_checkpoint() -> bool:
    """Return whether a selective checkpoint sees the operations that run here."""
    return dispatch_modes() != 0 and any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def unseen(f: Callable[P, T]) -> Callable[P, T]:
    """Return ``f`` such that no selective checkpoint sees its operations; other modes do.

    A selective checkpoint finds the result that it kept by counting operations. So everything that
    runs only in forward, or only in the recomputation, has to be unseen. Where time matters, a
    function calls ``unseen`` of itself only if there are ``dispatch_modes``.
    """

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not in_selective_checkpoint():
            return f(*args, **kwargs)
        stack = _get_current_dispatch_mode_stack()
        _replace_modes([mode for mode in stack if not isinstance(mode, _SELECTIVE)])
        try:
            return f(*args, **kwargs)
        finally:
            _replace_modes(stack)

    return run


def _replace_modes(stack: list[Any]) -> None:
    """Make ``stack``, from the outermost to the innermost, the stack of dispatch modes."""
    while dispatch_modes():
        _pop_mode()
    for mode in stack:
        _push_mode(mode)


# --- tensors and modules --------------------------------------------------------------------------


version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Return how often the memory of a tensor has been written to in place."""


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of the storage of ``tensor``, unique while the storage is alive.

    It is 0 for a tensor that has no storage, such as a sparse one.
    """
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return 0


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the data of ``tensor``: several if it is sparse or a wrapper.

    A wrapper is a tensor of a class such as DTensor or a jagged nested tensor.
    """
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in stored_parts(getattr(tensor, name))]


same_storage: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
"""Return whether two tensors share a storage."""


def address(tensor: torch.Tensor) -> int | tuple[int, int]:
    """Return where the data of ``tensor`` begins, also of one without data, while it is alive."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # fs.trace records
        return storage_id(tensor), int(tensor.storage_offset())


def local_part(dtensor: Any) -> torch.Tensor:
    """Return the tensor that a DTensor holds on this rank, as it is, once it has arrived."""
    local: Any = dtensor._local_tensor
    # Why by name: while a collective of torch runs, its result is of a private class.
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` for a tensor subclass that overrides ``__torch_dispatch__`` only."""


without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""The context in which a subclass calls a function as if it had no ``__torch_function__``."""


def wrapper_subclass(
    cls: type[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, requires_grad: bool
) -> Any:
    """Return a tensor of class ``cls`` that has a shape, a dtype and a device, but no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` has been called."""
    return module._compiled_call_impl is not None


# --- graphs and Dynamo ----------------------------------------------------------------------------


def recording_graph() -> bool:
    """Return whether ``make_fx`` is recording the operations that run here."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


class ValueReadError(RuntimeError):
    """Python code asked for the value of a tensor that has none."""


def record_graph(function: Callable[..., Any], examples: list[Any]) -> tuple[torch.fx.Graph, dict[str, torch.Tensor]]:
    """Return the graph of the operations that ``function`` runs below autograd, and its constants.

    Arguments:
        function: a function from tensors to a list of tensors and numbers.
        examples: the tensors to call it with; it gets tensors like these, without data.

    Raises:
        ValueReadError: Python code of ``function`` depends on the value of a tensor.
    """
    # Why here: they import sympy, which takes long.
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    # Why: functions of torch.compile in the code run as if they were not compiled.
    dynamo = sys.modules.get("torch._dynamo")
    plain = dynamo.config.patch(error_on_nested_fx_trace=False) if dynamo else contextlib.nullcontext()
    try:
        with plain:
            module = make_fx(function, tracing_mode="fake")(*examples)
    except GuardOnDataDependentSymNode as error:
        raise ValueReadError(str(error).partition("\n")[0]) from error
    names = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    return module.graph, {name: getattr(module, name) for name in names}


def recording_or_transforming() -> bool:
    """Return whether a dispatch mode or a ``torch.func`` transform is active here."""
    return torch._C._len_torch_dispatch_stack() > 0 or transforms_active()


def untraced(f: Callable[P, T]) -> Callable[P, T]:
    """Return ``f`` such that Dynamo traces neither ``f`` nor the functions that ``f`` calls.

    Compiled functions that ``f`` calls still run compiled.
    """
    disabled = hidden_from_dynamo(f, "funcshard starts collectives here, which run between graphs")

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        # Why the callback: inside another such function Dynamo is off already, and turning it off
        # takes longer than the check.
        if "torch._dynamo" not in sys.modules or (not is_dynamo_compiling() and get_eval_frame_callback() is None):
            return f(*args, **kwargs)
        return disabled(*args, **kwargs)

    return run


def hidden_from_dynamo(f: Callable[P, T], reason: str) -> Callable[P, T]:
    """Return ``f`` such that Dynamo does not trace it; its errors give the reason."""
    # Why: a graph would contain the memory that a collective writes into, but not the collective.
    # Why not torch.compiler.disable: it imports Dynamo, which takes longer than importing this
    # library.
    hidden = _disable_dynamo(f)
    hidden._torchdynamo_disable, hidden._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
    return hidden


def callers_level() -> int:
    """Return the ``stacklevel`` with which a warning points at the code that called this library.

    The level skips all frames of this library and of torch.
    """
    package = sys.modules[__name__.partition(".")[0]]
    inside = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (package, torch))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


# --- checkpoints of torch.distributed, and CUDA ---------------------------------------------------


def dcp_storage_info() -> Any:
    """Return the class in which ``torch.distributed.checkpoint`` stores a tensor's file and offset.

    It belongs to the file storage of that package.
    """
    # Why not at the top of this file: importing the package takes a second.
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def cuda_sleep(cycles: int) -> None:
    """Keep the current CUDA stream busy for a number of clock cycles."""
    torch.cuda._sleep(cycles)


# --- traces without data --------------------------------------------------------------------------


def fake_tensors() -> Any:
    """Return a context in which tensors have shapes, dtypes and storages, but no data.

    They behave as CPU tensors do, so autocast acts on them and operations choose the kernels of the
    CPU.
    """
    return FakeTensorMode()


def recording_tensors() -> Any:
    """Return a context as ``record_graph`` records in; numbers of tensors are symbols in it."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy, which takes long

    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no data, because ``fake_tensors`` or a recording made it."""
    return isinstance(tensor, FakeTensor)


is_zero_tensor: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_zerotensor")
"""Return whether a tensor is zeros without memory; torch makes such in forward-mode derivatives."""


def asks_for_data(error: Exception) -> bool:
    """Return whether an error says that an operation needs the values of a fake tensor."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def next_sequence_number() -> int:
    """Return the sequence number that the next autograd node of this thread will have."""
    return int(torch._C._autograd._get_sequence_nr())


def running_sequence_number() -> int | None:
    """Return the sequence number of the node that backward runs now; ``None`` outside of it."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def refresh_flat_weights(module: torch.nn.RNNBase) -> None:
    """Let the second list of an RNN's weights hold the weights in its parameter table."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
