"""Uses of torch's private API, so that a new torch release is checked against few files.

torch has no public name for these facts and switches.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch._compile import _disable_dynamo
from torch._functorch import eager_transforms, pyfunctorch
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from funcshard._utils.tensors import byte_view

P = ParamSpec("P")
T = TypeVar("T")

# --- torch.func transforms ------------------------------------------------------------------------

transforms_active: Callable[[], list[Any] | None] = (
    torch._C._functorch.get_interpreter_stack
)
"""Return the ``torch.func`` transforms that this code runs inside, if any."""


def transform_level() -> int:
    """Return how many ``torch.func`` transforms this code runs inside."""
    return len(transforms_active() or ())


# The level of a tensor's transform: -1 for a plain one, and -2 if the transform has ended.
_level: Callable[[torch.Tensor], int] = torch._C._functorch.maybe_get_level

# The tensor one level below.
_get_unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a ``torch.func`` transform wraps the tensor."""
    return _level(tensor) != -1


is_legacy_batched: Callable[[torch.Tensor], bool] = (
    torch._C._functorch.is_legacy_batchedtensor
)
"""Return whether the tensor is a batch of ``torch.autograd.grad(is_grads_batched=True)``."""


def belongs_to_transform_above(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` was captured from a transform that doesn't run here."""
    tensor_level, transform_stack = _level(tensor), transforms_active() or []
    if tensor_level > len(transform_stack):
        return True
    # Why compare kinds: a transform that was opened here can have the same level as one above.
    # The tensor inside of a batch has one more dim.
    if tensor_level <= 0:
        return False
    is_batched = _get_unwrapped(tensor).dim() != tensor.dim()
    return is_batched != (transform_stack[tensor_level - 1].key().name == "Vmap")


def dual_level_active() -> bool:
    """Return whether a ``forward_ad.dual_level`` is open that no ``torch.func.jvp`` opened."""
    # Why: one_forward_level opens one too, which only jvp uses.
    return forward_ad._current_level >= 0 and eager_transforms.JVP_NESTING == 0


def derivatives_of(tensor: torch.Tensor) -> str:
    """Return which derivatives are taken here by a tensor, from the outermost to the innermost.

    Returns:
        ``"r"`` for each in reverse mode, and ``"f"`` for each in forward mode.
    """
    stack = transforms_active() or []
    reverse_levels = set[int]()
    inner_tensor = tensor
    while True:
        tensor_level = max(0, _level(inner_tensor))
        if inner_tensor.requires_grad:
            reverse_levels.add(tensor_level)
        if not tensor_level:
            break
        inner_tensor = _get_unwrapped(inner_tensor)
    kinds = "r" if 0 in reverse_levels else ""
    if dual_level_active():
        kinds += "f"
    for level, transform in enumerate(stack, 1):
        if transform.key().name == "Jvp":
            kinds += "f"
        elif level in reverse_levels:
            kinds += "r"
    return kinds


@contextlib.contextmanager
def one_forward_level() -> Iterator[None]:
    """Open torch's one level of forward-mode differentiation for the ``with`` block.

    Threads can't each enter it. A ``torch.func.jvp`` in any thread then uses the open one.
    """
    if forward_ad._current_level >= 0:
        yield
        return
    # Lets each torch.func.jvp believe that it runs inside another one. Why not one more jvp: the
    # first call of that imports all decompositions of torch, which takes a second.
    with eager_transforms.jvp_increment_nesting(), forward_ad.dual_level():
        yield


def apply_by_level(function: Any, call: Any, *tensors: torch.Tensor | None) -> Any:
    """Return ``function.apply(call, *tensors)``, computing values and tangents together.

    torch computes values first, and then tangents by ``function.jvp``. Where both need the same
    intermediate results, those are computed twice. So forward mode calls ``call.duals`` instead.

    Arguments:
        function: an autograd Function, whose ``jvp`` serves dual levels that no transform opened.
        call: ``call.duals(tensors, tangents, level)`` -> outputs and their tangents, computed one
            level below the forward-mode transform of that level. A tangent may be ``None``.
    """
    if not transforms_active():
        return function.apply(call, *tensors)
    functorch = torch._C._functorch
    interpreter: Any = pyfunctorch.retrieve_current_functorch_interpreter()
    level, transform_name = interpreter.level(), interpreter.key().name
    # Note: a pullback that runs when its transform has ended has tensors that it wraps no longer.
    tensors = tuple([None if t is None else functorch.unwrap_if_dead(t) for t in tensors])
    if transform_name == "Vmap":  # whose rule the function has
        return function.apply(call, *tensors)
    # Note: from here on each tensor is of this level, also one that is constant to it.
    tensors, _ = interpreter.lift(tensors, {})

    def unwrap(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else functorch._unwrap_for_grad(tensor, level)

    if transform_name == "Jvp":
        pairs = [(None, None) if t is None else forward_ad.unpack_dual(t) for t in tensors]
        primals, tangents = ([*map(unwrap, parts)] for parts in zip(*pairs, strict=True))
        with interpreter.lower():
            outs, out_tangents = call.duals(primals, tangents, level)
        return tuple(
            functorch._wrap_for_grad(out, level)
            if tangent is None
            else forward_ad.make_dual(out, tangent)
            for out, tangent in zip(outs, out_tangents, strict=True)
        )

    def forward(call: Any, *tensors: torch.Tensor) -> Any:
        # Why: autograd turns both modes off inside of forward, for this level alone.
        with (
            torch.enable_grad(),
            forward_ad._set_fwd_grad_enabled(True),
            interpreter.lower(),
        ):
            outs = apply_by_level(function, call, *map(unwrap, tensors))
        return tuple(functorch._wrap_for_grad(out, level) for out in outs)

    methods = {"setup_context": function.setup_context, "backward": function.backward}
    methods = {name: staticmethod(f) for name, f in {**methods, "forward": forward}.items()}
    one_level: Any = type(
        function.__name__, (torch.autograd.function._SingleLevelFunction,), methods
    )
    with enable_single_level_autograd_function():
        return one_level.apply(call, *tensors)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor below all transforms that wrap ``tensor``."""
    while is_transformed(tensor):
        tensor = _get_unwrapped(tensor)
    return tensor


def unwrapped_bytes(tensor: torch.Tensor) -> bytes:
    """Return the data of ``tensor``, below all transforms."""
    tensor = unwrapped(tensor)
    # Why in a thread: no transform is active there, which would wrap what is computed.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(
            lambda: bytes(byte_view(tensor.detach().cpu()).tolist())
        ).result()


no_transforms: Any = pyfunctorch.temporarily_clear_interpreter_stack
"""Return a context without transforms."""


# --- loops over unit vectors ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class BasisLoop:
    """A call of torch that differentiates along one unit vector after another.

    Attributes:
        name: the function that was called.
        arguments: the tensors whose elements give the unit vectors; none in reverse mode, where
            these are outputs.
    """

    name: str
    arguments: tuple[torch.Tensor, ...] = ()


def basis_loops(
    bottom: CodeType | None = None, *, outer: bool = False
) -> dict[int, BasisLoop]:
    """Return the loops over unit vectors around this code, by level of transform.

    ``torch.autograd.functional``, which uses no transform, has level 0.

    Arguments:
        bottom: the code of a function that runs below all transforms of its callers.
        outer: whether to leave out the innermost loop of level 0.

    Raises:
        RuntimeError: this torch runs such a loop in an unknown way.
    """
    met_names: set[str] = set()
    met_loops = _loops_of_frames(sys._getframe(1), bottom, outer, met_names)
    for name in met_names - _known_loops:
        _check_loop(name)
    return met_loops


def _loops_of_frames(
    frame: Any, bottom: CodeType | None, outer: bool, met: set[str]
) -> dict[int, BasisLoop]:
    """Return ``basis_loops`` of a frame and its callers; add all of them to ``met``."""
    # Why look at frames: the tensors inside jacrev are those inside vmap of vjp, where the caller
    # has chosen the vectors.
    loop_codes, functional_file = _loop_codes(), torch.autograd.functional.__file__
    transforms_file = torch.func.jvp.__code__.co_filename
    loops_by_level: dict[int, BasisLoop] = {}
    callee_name, opened_locals, at_bottom = "", None, False
    while frame is not None:
        code = frame.f_code
        name = loop_codes.get(id(code))
        if name is not None:
            met.add(name)
        at_bottom = at_bottom or code is bottom
        if at_bottom and code.co_filename != functional_file:
            pass
        elif code.co_filename == transforms_file:
            if code.co_name in ("_jvp_with_argnums", "_vjp_with_argnums"):
                opened_locals = frame.f_locals
            elif opened_locals is not None:
                # Why get: _check_loop finds out whether torch has other names for its variables.
                if name in (_JACREV, _JACFWD):
                    arguments = (
                        opened_locals.get("flat_primals", ()) if name == _JACFWD else ()
                    )
                    loops_by_level[opened_locals.get("level", -1)] = BasisLoop(
                        name, arguments
                    )
                opened_locals = None
        # Why not in its own backward: that one runs once for each unit vector, and the collectives
        # that it records belong to the caller.
        elif name == _JACOBIAN and callee_name != "_autograd_grad":
            if not outer:
                loops_by_level[0] = BasisLoop(name)
            outer = False
        callee_name, frame = code.co_name, frame.f_back
    return loops_by_level


_JACREV = "torch.func.jacrev"
_JACFWD = "torch.func.jacfwd"
_JACOBIAN = "torch.autograd.functional.jacobian"
_known_loops: set[str] = set()  # those that _check_loop has seen to be found


@functools.cache
def _loop_codes() -> dict[int, str]:
    """Return the name of each loop by the ids of its code and of functions inside."""

    def nested(code: CodeType) -> Iterator[CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from nested(constant)

    # Note: the code of what the public function returns, so that names inside torch don't matter.
    jacobian_functions = {_JACREV: torch.func.jacrev(abs), _JACFWD: torch.func.jacfwd(abs)}
    code_names = {
        id(code): name
        for name, f in jacobian_functions.items()
        for code in nested(f.__code__)
    }
    return {**code_names, id(torch.autograd.functional.jacobian.__code__): _JACOBIAN}


def _check_loop(name: str) -> None:
    """Raise ``RuntimeError`` unless ``basis_loops`` finds this torch's loop."""
    # Why: the frames of torch have private names, and with other names a loop would be taken for
    # no loop. Why another thread: no transform, dispatch mode or recording is active there.
    seen_loops: list[Any] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        loops = _loops_of_frames(sys._getframe(0), None, False, set())
        seen_loops.append(
            [
                (level - transform_level(), loop.name, [*map(torch.numel, loop.arguments)])
                for level, loop in loops.items()
            ]
        )
        return x * x

    def run() -> None:
        x = torch.zeros(2, dtype=torch.float32, device="cpu")
        if name == _JACOBIAN:
            torch.autograd.functional.jacobian(watched, x)
        elif name == _JACREV:
            torch.func.jacrev(watched)(x)
        else:
            torch.func.jacfwd(watched)(x)

    thread = threading.Thread(target=run, name=f"check of {name}")
    thread.start()
    thread.join()
    # Note: torch may run the function again; the first run counts.
    if seen_loops[:1] != [[(0, name, [2] * (name == _JACFWD))]]:
        raise RuntimeError(
            f"over shards, {name} needs to know how torch runs it, and torch {torch.__version__} "
            "runs it in an unknown way: call torch.func.jvp or vjp along vectors of your own, or "
            "use a release of torch that the documentation lists"
        )
    _known_loops.add(name)


# --- autograd -------------------------------------------------------------------------------------

# The node whose gradient this thread computes now; None outside of backward.
_current_node: Callable[[], Any] = torch._C._current_autograd_node

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward that runs on this thread, or -1 if none does."""


def in_grad() -> bool:
    """Return whether ``torch.autograd.grad`` runs on this thread, and not ``loss.backward()``."""
    # Note: torch calls it invalid in a backward by chosen inputs, as grad's always is.
    return graph_task_id() != -1 and not torch.autograd._is_checkpoint_valid()


runs_in_backward: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return whether the backward that runs on this thread computes the gradient of a node."""


def hooks_allowed() -> bool:
    """Return whether saved-tensor hooks are: not in ``torch.func``, nor while remat recomputes."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled() and not transforms_active()  # type: ignore[attr-defined]


# True: also while torch traces.
outer_saved_tensors_hooks: Callable[[], Any] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
"""Return the innermost active pair of saved-tensor hooks, or ``None``."""


def inside_hooks(pack: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    """Return ``pack(tensor, outer=hooks)``, where ``hooks`` are the active pair, or ``None``."""
    outer_hooks = outer_saved_tensors_hooks()
    inner_pack: Any = functools.partial(pack, outer=outer_hooks)
    # Why: from torch 2.15 on, a selective checkpoint warns of hooks around it. Ours pass on what
    # isn't a gathered leaf, so only those around them are the user's. torch marks its own hooks so.
    inner_pack._checkpoint_internal, inner_pack._user_hooks = True, outer_hooks
    return inner_pack


_TRANSPOSES = ("TBackward0", "TransposeBackward0", "PermuteBackward0")


def cast_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Any, int, bool] | None:
    """Return what ``tensor`` is a cast of, as by autocast, if the autograd graph tells.

    Returns:
        The whole cast, of which ``tensor`` may be a view; the source's autograd node and output
        number; and whether the source was transposed. ``None`` for no cast, or after a write.
    """
    base_tensor = getattr(tensor, "_base", None)  # None for what is no view
    whole_cast = tensor if base_tensor is None else base_tensor
    cast_node = whole_cast.grad_fn
    if cast_node is None or cast_node.name() != "ToCopyBackward0" or version(whole_cast):
        return None
    source_node, output_index = cast_node.next_functions[0]
    if source_node is None or source_node.name() not in _TRANSPOSES:
        return whole_cast, source_node, output_index, False
    source_node, output_index = source_node.next_functions[0]
    return whole_cast, source_node, output_index, True


sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""Return an autograd node's number; forward numbers its nodes upwards."""


def signed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Store the signature of a Function's ``forward``, without defaults, on it; return it."""
    # Why: at every call, Function.apply computes the signature of forward and binds the arguments
    # to it, to fill in defaults. That takes longer than the rest of a small unit. Python finds a
    # stored signature at once (PEP 362), and without defaults there is nothing to bind.
    assert all(
        p.default is inspect.Parameter.empty
        for p in inspect.signature(forward).parameters.values()
    )
    forward.__signature__ = _Positional.from_callable(forward)  # type: ignore[attr-defined]
    return forward


class _Positional(inspect.Signature):
    """A signature whose ``bind`` doesn't check the arguments."""

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        # Why bool: without arguments it does nothing, and there are no defaults to apply.
        return SimpleNamespace(args=args, kwargs=kwargs, apply_defaults=bool)


# --- checkpoints ----------------------------------------------------------------------------------

# The active dispatch modes, from the outermost to the innermost.
_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of dispatch modes that are active here."""


def _is_selective(mode: Any) -> bool:
    """Return whether a dispatch mode is one of torch's selective checkpoints."""
    return type(mode).__module__ == "torch.utils.checkpoint"


def in_selective_checkpoint() -> bool:
    """Return whether a selective checkpoint sees the operations here."""
    return dispatch_modes() != 0 and any(map(_is_selective, _modes()))


StopRecomputation: type[Exception] = torch.utils.checkpoint._StopRecomputationError
"""By this exception a checkpoint ends its second run, once it has what backward needs."""


def is_raised_by(cause_type: type[BaseException], error: BaseException) -> bool:
    """Return whether ``error`` is an exception of a type, or was raised because of one."""
    seen_ids: set[int] = set()  # as an exception may be its own cause
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen_ids:
        if isinstance(cause, cause_type):
            return True
        seen_ids.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def unseen(f: Callable[P, T]) -> Callable[P, T]:
    """Return ``f`` such that no selective checkpoint sees its operations.

    A selective checkpoint counts operations to find a kept result. So hide everything that runs
    only in forward, or only in the recomputation.
    """

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        # Why asked first: most calls are in no mode, and this takes less time.
        if not dispatch_modes() or not in_selective_checkpoint():
            return f(*args, **kwargs)
        mode_stack = _modes()
        _replace_modes([mode for mode in mode_stack if not _is_selective(mode)])
        try:
            return f(*args, **kwargs)
        finally:
            _replace_modes(mode_stack)

    return run


def _replace_modes(stack: list[Any]) -> None:
    """Make ``stack``, outermost first, the stack of dispatch modes."""
    # Why of the base class: the methods of some modes do more than to leave and enter the stack.
    for mode in reversed(_modes()):
        TorchDispatchMode.__exit__(mode, None, None, None)
    for mode in stack:
        TorchDispatchMode.__enter__(mode)


# --- tensors and modules --------------------------------------------------------------------------


version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Return how often the memory of a tensor has been written to in place."""


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's storage while it's alive; 0 without one, as of a sparse tensor."""
    try:
        # Why no address: a tensor without data has none. torch keeps one object for each storage.
        return id(tensor.untyped_storage())
    # Why this error: torch has no question for it. Sparse tensors have no storage, and neither have
    # tensors that vmap wraps, whose layout says strided; torch raises this for both.
    except NotImplementedError:
        return 0


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with the data of ``tensor``: several of a sparse one or a wrapper.

    Wrappers are DTensors, jagged nested tensors and the like.
    """
    if tensor.layout is torch.sparse_coo:
        # Why private names: the public ones sum up duplicates first.
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    flatten_function = getattr(tensor, "__tensor_flatten__", None)
    if flatten_function is None:
        return [tensor]
    # Why the check: from torch 2.15 on, a DTensor also names its mesh.
    inner_tensors = [getattr(tensor, name) for name in flatten_function()[0]]
    return [
        stored_part
        for inner_tensor in inner_tensors
        if isinstance(inner_tensor, torch.Tensor)
        for stored_part in stored_parts(inner_tensor)
    ]


def address(tensor: torch.Tensor) -> int | tuple[int, int]:
    """Return where the data of ``tensor`` begins while it's alive, also of a fake tensor."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # fs.trace records
        return storage_id(tensor), int(tensor.storage_offset())


def local_part(dtensor: Any) -> torch.Tensor:
    """Return a DTensor's tensor on this rank, once it has arrived."""
    local_tensor: Any = getattr(dtensor, "_local_tensor", None)
    if local_tensor is None:
        with torch.no_grad():
            return dtensor.to_local()
    # Why by name: while a collective of torch runs, its result is of a private class.
    if type(local_tensor).__name__ == "AsyncCollectiveTensor":
        return local_tensor.wait()
    return local_tensor


no_torch_function: Any = torch.nn.Parameter.__torch_function__
"""The ``__torch_function__`` for a tensor subclass that overrides ``__torch_dispatch__`` only.

It calls a function as if the subclass had no ``__torch_function__``.
"""


wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
"""Return a tensor of a class, without memory."""


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has hooks."""
    accumulating: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(parameter._backward_hooks or accumulating)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` has been called."""
    return getattr(module, "_compiled_call_impl", None) is not None


# --- graphs and Dynamo ----------------------------------------------------------------------------


def recording_graph() -> bool:
    """Return whether ``make_fx`` is recording the operations that run here."""
    proxy_module = sys.modules.get("torch.fx.experimental.proxy_tensor")  # make_fx is in it
    if not dispatch_modes() or proxy_module is None:
        return False
    recorder = proxy_module.ProxyTorchDispatchMode
    return any(isinstance(mode, recorder) for mode in _modes())


def check_thread(what: str) -> None:
    """Raise ``RuntimeError`` where compiling or recording in a thread crashes torch before 2.13."""
    # Why: without CUDA, it crashes in the second thread that makes fake tensors.
    elsewhere = threading.current_thread() is not threading.main_thread()
    if torch.__version__ < "2.13" and elsewhere and not torch.cuda.is_available():
        raise RuntimeError(
            "torch before 2.13 crashes the process when several threads compile or record, as "
            f"simulated ranks do; found {torch.__version__}: {what}, or install a newer torch"
        )


class ValueReadError(RuntimeError):
    """Python code asked for the value of a tensor that has none."""


def record_graph(
    function: Callable[..., Any],
    examples: Sequence[Any],
    *,
    tracing_mode: Literal["fake", "real"] = "fake",
) -> tuple[torch.fx.Graph, dict[str, torch.Tensor]]:
    """Return the graph of what ``function`` runs below autograd, and its constants.

    Arguments:
        function: a function from tensors to a list of tensors and numbers.
        examples: the tensors to call it with; it gets tensors like these, without data.
        tracing_mode: ``"real"`` if the examples have no data already.

    Raises:
        ValueReadError: Python code of ``function`` depends on the value of a tensor.
    """
    # Why here: it imports sympy, which takes long.
    from torch.fx.experimental.proxy_tensor import make_fx

    # Why: functions of torch.compile in the code run as if they were not compiled.
    dynamo = sys.modules.get("torch._dynamo")
    patched_config = (
        dynamo.config.patch(error_on_nested_fx_trace=False)
        if dynamo
        else contextlib.nullcontext()
    )
    try:
        with patched_config:
            graph_module = make_fx(function, tracing_mode=tracing_mode)(*examples)
    except Exception as error:
        if not asks_for_data(error):
            raise
        raise ValueReadError(str(error).partition("\n")[0]) from error
    constant_names = {
        str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"
    }
    return graph_module.graph, {
        name: getattr(graph_module, name) for name in constant_names
    }


def recording_or_transforming() -> bool:
    """Return whether a dispatch mode or a ``torch.func`` transform is active here."""
    return dispatch_modes() > 0 or bool(transforms_active())


weight_norm_kernel: Callable[..., torch.Tensor] = torch._weight_norm
"""Return ``g * v / |v|``, of ``(v, g, dim)``: what ``parametrizations.weight_norm`` computes."""

function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
"""Return the modes of this thread that see calls of torch's functions."""

# Returns what Dynamo does with new frames of this thread; None if it is off.
_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def untraced(f: Callable[P, T], warning: str = "") -> Callable[P, T]:
    """Return ``f`` such that Dynamo traces neither ``f`` nor what it calls.

    Compiled functions that ``f`` calls still run compiled.

    Arguments:
        f: the function.
        warning: warns if ``torch.compile`` was given the object of the method ``f``, or a function
            that calls it, unless the object has ``compiles_units``. With ``fullgraph``, it is in
            torch's error.
    """

    @functools.wraps(f)
    def warn(*args: P.args, **kwargs: P.kwargs) -> T:
        # Note: by default Python shows a warning once for each line of code.
        if warning and not getattr(args[0], "compiles_units", False):
            warnings.warn(warning, stacklevel=callers_level())
        return f(*args, **kwargs)

    reason = warning or "funcshard starts collectives here, which run between graphs"
    hidden, hidden_warn = hidden_from_dynamo(f, reason), hidden_from_dynamo(warn, reason)

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        # Why asked first: without Dynamo nothing compiles, and the rest takes longer.
        if "torch._dynamo" not in sys.modules:
            return f(*args, **kwargs)
        # Dynamo takes the condition for true, and Python for false.
        if is_dynamo_compiling():
            return hidden_warn(*args, **kwargs)
        # Why: inside another such function Dynamo is off already, and turning it off takes longer
        # than the check.
        if _callback() is None:
            return f(*args, **kwargs)
        return hidden(*args, **kwargs)

    return run


def untraced_with_warning(warning: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return the decorator ``untraced`` with a warning."""
    return functools.partial(untraced, warning=warning)


def hidden_from_dynamo(f: Callable[P, T], reason: str) -> Callable[P, T]:
    """Return ``f`` such that Dynamo doesn't trace it; its errors give the reason."""
    # Why: a graph would contain the memory that a collective writes into, but not the collective.
    # Why not torch.compiler.disable: it imports Dynamo, which takes longer than importing this
    # library. Why not such a function of ours: Dynamo would compile it, and skips those of torch.
    hidden: Any = _disable_dynamo(f)
    # By these marks Dynamo knows the function, and the reason for its error.
    hidden._torchdynamo_disable, hidden._torchdynamo_disable_msg = True, reason
    return hidden


def callers_level() -> int:
    """Return the ``stacklevel`` of a warning about code outside of this library and torch."""
    package = sys.modules[__name__.partition(".")[0]]
    inside_folders = tuple(
        os.path.dirname(str(module.__file__)) + os.sep for module in (package, torch)
    )
    stack_level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside_folders):
        stack_level, frame = stack_level + 1, frame.f_back
    return stack_level


# --- CUDA -------------------------------------------------------------------------------------


@functools.cache
def without_mode_check(function: Any) -> Callable[..., Any]:
    """Return a copy of a function of torch that doesn't look for modes."""
    # Why: a function that looks for them by another name would call an active mode without end.
    assert "has_torch_function" in function.__code__.co_names
    unchecked_globals = {
        **function.__globals__,
        "has_torch_function": lambda tensors: False,
    }
    function_copy = FunctionType(
        function.__code__, unchecked_globals, function.__name__, function.__defaults__
    )
    function_copy.__kwdefaults__ = function.__kwdefaults__
    return function_copy


def cuda_sleep(cycles: int) -> None:
    """Keep the current CUDA stream busy for a number of clock cycles."""
    torch.cuda._sleep(cycles)


# --- traces without data --------------------------------------------------------------------------


def recording_tensors() -> Any:
    """Return a context as in ``record_graph``, in which numbers of tensors are symbols."""
    # Why here: it imports sympy, which takes long.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether ``fake_tensors`` or a recording made a tensor."""
    return any(cls.__name__ == "FakeTensor" for cls in type(tensor).__mro__)


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is zeros without memory, as in forward-mode derivatives."""
    return tensor._is_zerotensor()


def asks_for_data(error: Exception) -> bool:
    """Return whether an error says that an operation needs a fake tensor's values."""
    # Why by name: they lie in private modules. Why by words: of torch.equal, torch.tensor(
    # [x.sum()]), .numpy() and f"{loss:.2f}" only the first one's error has a class, and neither has
    # that of a number which code kept from an earlier recording ("not tracked").
    names = (
        "DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"
    )  # fmt: skip
    words = (
        "data is not allocated yet", ".numpy() is not supported", "FakeTensor.__format__",
        "not tracked with proxy",
    )  # fmt: skip
    return any(cls.__name__ in names for cls in type(error).__mro__) or any(
        part in str(error) for part in words
    )


def next_sequence_number() -> int:
    """Return the number that the next autograd node of this thread will have."""
    # Note: an operation that shows the number would take it.
    return int(torch._C._autograd._get_sequence_nr())


def running_sequence_number() -> int | None:
    """Return the number of the node that backward runs now, or ``None``."""
    node: Any = _current_node()
    if node is None:
        return None
    return int(node._sequence_nr())


def refresh_flat_weights(module: torch.nn.RNNBase) -> None:
    """Let an RNN's second list of weights hold those of its parameter table."""
    names = module._flat_weights_names
    module._flat_weights = [getattr(module, name) for name in names]


# --- kernels --------------------------------------------------------------------------------------

orthogonalise: Callable[..., torch.Tensor] = _zeropower_via_newtonschulz
"""Return a matrix with singular values near one, of ``(update, ns_coefficients, ns_steps, eps)``.

It may write into ``update``. ``torch.optim.Muon`` calls it, so the bits are the same.
"""

adjusted_rate: Callable[..., float] = _adjust_lr
"""Return Muon's learning rate for a matrix, of ``(lr, adjust_lr_fn, shape)``."""


def unscale_in_place(
    tensors: Sequence[torch.Tensor], factors: Mapping[torch.device, torch.Tensor]
) -> dict[torch.device, torch.Tensor]:
    """Multiply tensors by a factor in place, and look for infinities and NaN, in one pass.

    Arguments:
        tensors: dense tensors of float32 or wider, without an autograd graph.
        factors: the factor, a float32 scalar, on each device of the tensors.

    Returns:
        For each device a float32 scalar: 1 if a tensor there had an infinity or NaN, else 0.

    Source: ``torch.amp.GradScaler.unscale_`` calls the same kernel.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        # The kernel takes real numbers of one dtype and device.
        real_tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        by_kind.setdefault((real_tensor.device, real_tensor.dtype), []).append(real_tensor)
    found_infs = {
        device: torch.zeros(1, device=device, dtype=torch.float32) for device, _ in by_kind
    }
    for (device, _), same_kind in by_kind.items():
        torch._amp_foreach_non_finite_check_and_unscale_(
            same_kind, found_infs[device], factors[device].reshape(1)
        )
    return {device: found_inf.squeeze() for device, found_inf in found_infs.items()}
