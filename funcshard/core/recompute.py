"""``remat``: a function that keeps only its inputs for backward, and computes the rest again there.

Outside of ``torch.func`` transforms it calls ``torch.utils.checkpoint``. Transforms allow no
saved-tensor hooks, so there an autograd Function, ``_Remat``, saves its inputs and recomputes. Its
backward is rematerialised too, so it can be differentiated any number of times. Read ``remat``,
then ``_Remat``, then ``_Call``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from funcshard._utils import tree
from funcshard._utils.closures import captured
from funcshard._utils.process_state import RandomState
from funcshard._utils.tensors import is_continuous
from funcshard._utils.torch_private import (
    BasisLoop,
    StopRecomputation,
    apply_by_level,
    belongs_to_transform_above,
    hooks_allowed,
    is_raised_by,
    is_transformed,
    signed,
    storage_id,
    transform_level,
    transforms_active,
    version,
)
from funcshard._utils.tree import tensors_in
from funcshard.core.basis import (
    Loops,
    acting_for,
    below,
    below_transforms,
    current_loops,
    within,
)
from funcshard.core.replaced_kernels import repeating_any_order

Tensors = Sequence[torch.Tensor]
Contents = list[tuple[Any, Any]]  # lists and dictionaries, each with a copy
AutocastSettings = tuple[
    tuple[str, bool, torch.dtype], ...
]  # type of device, whether on, dtype


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """Turn your function into one that keeps only its inputs, and recomputes the rest in backward.

    ``remat(unshard(apply, unit, mesh))`` frees the gathered leaves as ``reshard`` does, and the
    activations too, also under ``torch.func`` transforms, where ``reshard`` frees nothing. The
    second computation has the random numbers and the autocast of the first, and lists, dictionaries
    and attributes of objects in the arguments hold what they held.

    Arguments:
        f: your function of pytrees. Under ``torch.func`` transforms, pass tensors that need a
            gradient as arguments; ``f`` may not capture them.

    Returns:
        A function of the same arguments and results. You may nest it, map it with ``vmap``, and
        differentiate it any number of times in forward and in reverse mode.

    Raises:
        RuntimeError: you modified a tensor in the arguments in place after forward.
        ValueError: under a ``torch.func`` transform, ``f`` captures a tensor that the transform
            differentiates or maps over, or that requires a gradient; or it puts a tensor into a
            list, dictionary or object in its arguments.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3, 2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     apply = lambda leaves, x: (x @ leaves["w"]).sum()
        ...     f = fs.remat(fs.unshard(apply, plan.units[""], mesh))
        ...     shard = fs.shard(params, plan, mesh)[""]
        ...     return torch.func.grad(f)(shard, torch.ones(1, 3))["float32"].tolist()
        >>> fs.simulate(main, world_size=2)
        [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]

    Source: ``jax.checkpoint``, also called ``jax.remat``.
    """

    if not callable(f):
        raise TypeError(
            f"remat takes a function, and returns one; found {f!r}: call the result with the "
            "arguments of f"
        )

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return f(*args, **kwargs)
        repeated_f = repeating_any_order(f)
        if hooks_allowed():
            # Why no state: torch would set the generator while a graph is recorded, and not in it.
            return checkpoint(
                _repeatable(repeated_f, kwargs),
                *args,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        if any(
            isinstance(value, torch.Tensor) and is_transformed(value)
            for value in captured(f)
        ):
            raise ValueError(_CAPTURED)
        tensors, build = _flattened((args, kwargs), ())

        def of_tensors(*tensors: torch.Tensor) -> Any:
            args, kwargs = build(tensors)
            contents = _contents((args, kwargs))
            out = repeated_f(*args, **kwargs)
            changed = [part for part, copy in contents if _is_changed(part, copy)]
            if any(isinstance(part, torch.Tensor) for part in _reached(changed)):
                raise ValueError(_WRITTEN)
            return out

        return _apply(of_tensors, tensors)

    return run


def _repeatable(f: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return ``f`` with ``kwargs``, whose later calls compute what the first one did, or raise."""
    states_before: list[tuple[weakref.ref[torch.Tensor], tuple[int, int]]] | None = None
    contents: Contents = []
    ambient: _AmbientState | None = None

    def run(*args: Any) -> Any:
        nonlocal states_before, contents, ambient
        if states_before is None:
            # Note: torch compares the arguments that are tensors, but not those inside trees.
            containers = [arg for arg in args if not isinstance(arg, torch.Tensor)]
            inner_tensors = tensors_in((containers, kwargs))
            states_before = [
                (weakref.ref(tensor), _data_state(tensor)) for tensor in inner_tensors
            ]
            contents = _contents((containers, kwargs))
            ambient = _AmbientState.capture()
            return f(*args, **kwargs)
        if any(
            (tensor := ref()) is not None and _data_state(tensor) != state
            for ref, state in states_before
        ):
            raise RuntimeError(_CHANGED)
        assert ambient is not None
        # Why: a list may have grown since, as that of the features in DenseNet, or a cache of keys.
        contents_after = _put(contents)
        try:
            with ambient.restored():
                return f(*args, **kwargs)
        except Exception as error:  # of any kind: the function is the user's
            # Why: code such as einx's turns every exception into one of its own.
            if is_raised_by(StopRecomputation, error):
                raise StopRecomputation from None
            error.add_note(_FAILED_AGAIN)
            raise
        finally:
            _put(contents_after)

    return run


def _contents(value: Any) -> Contents:
    """Return the lists, dictionaries and attributes of objects in a value, each with a copy."""
    return [(part, part.copy()) for part in _reached(value) if type(part) in _CONTAINERS]


def _reached(value: Any) -> Iterator[Any]:
    """Yield what tuples, lists, dictionaries and attributes hold, and these, each once."""
    seen_ids: set[int] = set()
    to_visit = [value]
    while to_visit:
        part = to_visit.pop()
        part_type = type(part)
        if part_type in _CONSTANTS or id(part) in seen_ids:
            continue
        seen_ids.add(id(part))
        yield part
        if issubclass(part_type, dict):
            to_visit += dict.values(part)
        elif issubclass(part_type, (tuple, list)):
            to_visit += (tuple if issubclass(part_type, tuple) else list).__iter__(part)
        elif not issubclass(part_type, _OPAQUE):
            # Why not getattr: it may be code of a user's class.
            with contextlib.suppress(AttributeError):
                to_visit.append(object.__getattribute__(part, "__dict__"))


def _put(contents: Contents) -> Contents:
    """Give lists and dictionaries the contents of their copies; return those that they had."""
    contents_before = [(container, container.copy()) for container, _ in contents]
    for container, copy in contents:
        if _is_changed(container, copy):
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(copy)
    return contents_before


def _is_changed(container: Any, copy: Any) -> bool:
    """Return whether a list or dictionary holds other objects than its copy."""
    pairs = [(x, x.values() if isinstance(x, dict) else ()) for x in (container, copy)]
    parts, copied_parts = [[*keys, *values] for keys, values in pairs]
    return len(parts) != len(copied_parts) or any(map(operator.is_not, parts, copied_parts))


def _data_state(tensor: torch.Tensor) -> tuple[int, int]:
    # Note: inference mode counts no writes. The second number is for a tensor that got other data
    # through ``.data``.
    return 0 if tensor.is_inference() else version(tensor), storage_id(tensor)


def _apply(f: Callable[..., Any], tensors: Tensors) -> Any:
    build_result: Callable[[Tensors], Any] | None = None

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal build_result
        out_tensors, build_result = _flattened(f(*tensors), tensors)
        return out_tensors

    call = _Call(flat, _AmbientState.capture(), current_loops())
    out_tensors = apply_by_level(_Remat, call, *tensors)
    assert build_result is not None, "apply has run the function"
    return build_result(out_tensors)


def _flattened(
    result: Any, inputs: Tensors
) -> tuple[tuple[torch.Tensor, ...], Callable[[Tensors], Any]]:
    """Return the tensors in a result, each once, and a function that makes the result of them."""
    values, unflatten = tree.flatten(result)
    input_ids = {id(tensor) for tensor in inputs}
    tensor_by_id: dict[int, torch.Tensor] = {}
    index_of: dict[int, int] = {}
    for value in values:
        if isinstance(value, torch.Tensor) and id(value) not in tensor_by_id:
            index_of[id(value)] = len(tensor_by_id)
            # Why a view: an autograd Function must not return one of its inputs itself.
            tensor_by_id[id(value)] = (
                value.view_as(value) if id(value) in input_ids else value
            )
    # Why apart: what is kept for later must not hold the tensors.
    indices = [index_of.get(id(value)) for value in values]
    constants = [None if isinstance(value, torch.Tensor) else value for value in values]

    def build(tensors: Tensors) -> Any:
        index_pairs = zip(indices, constants, strict=True)
        return unflatten([value if i is None else tensors[i] for i, value in index_pairs])

    return tuple(tensor_by_id.values()), build


def _apply_to_both(
    f: Callable[..., Any], first: Sequence[Any], second: Sequence[Any]
) -> Any:
    """Return ``f(first, second)``, rematerialised if gradients are recorded."""
    if not torch.is_grad_enabled():
        return f(first, second)
    first_count = len(first)
    return _apply(
        lambda *tensors: f(tensors[:first_count], tensors[first_count:]), [*first, *second]
    )


class _Remat(torch.autograd.Function):
    """``_Remat.apply(call, *tensors)``: return ``call.run(*tensors)``; save only the tensors."""

    @staticmethod
    @signed
    def forward(call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Why with gradients: the inputs are detached, so an output requires a gradient only if the
        # function captured a tensor that does.
        with torch.enable_grad(), _RefuseCaptured():
            out_tensors = below_transforms(
                call.run, *(tensor.detach() for tensor in tensors)
            )
        if any(out.requires_grad for out in out_tensors):
            raise ValueError(_CAPTURED)
        return out_tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        level, loops = transform_level(), ctx.call.loops
        ctx.loop, ctx.outer_loops = loops.get(level), below(loops, level)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        # Integers have no gradient.
        ctx.mark_non_differentiable(*(out for out in output if not is_continuous(out)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        out_indices = [i for i, grad in enumerate(grads) if grad is not None]
        in_indices = [i for i, needs in enumerate(ctx.needs_input_grad[1:]) if needs]
        vjp_call = functools.partial(ctx.call.vjp, ctx.loop, out_indices, in_indices)
        with within(ctx.outer_loops):
            in_grads = _apply_to_both(
                vjp_call, ctx.saved_tensors, [grads[i] for i in out_indices]
            )
        # An input that needs no gradient gets None, and so does the call itself.
        by_index = dict(zip(in_indices, in_grads, strict=True))
        return None, *map(by_index.get, range(len(ctx.saved_tensors)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: torch.Tensor) -> Any:
        batched_call = torch.func.vmap(
            call.run, in_dims=tuple(in_dims[1:]), randomness=info.randomness
        )
        batched = _Call(batched_call, call.ambient, call.loops)
        out_tensors = apply_by_level(_Remat, batched, *tensors)
        return out_tensors, (0,) * len(out_tensors)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of a rematerialised function.

    Attributes:
        run: the function, from tensors to tensors.
        ambient: the state in which it ran first.
        loops: torch's loops over unit vectors that it is part of; see ``basis``.
    """

    run: Callable[..., tuple[torch.Tensor, ...]]
    ambient: _AmbientState
    loops: Loops

    def recompute(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.ambient.restored():
            return self.run(*tensors)

    def vjp(
        self,
        loop: BasisLoop | None,
        out_indices: Sequence[int],
        in_indices: Sequence[int],
        inputs: Tensors,
        grads: Tensors,
    ) -> Sequence[Any]:
        """Return the gradients of some inputs, from those of some outputs."""
        if transforms_active():

            def chosen_outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                outs = self.recompute(*tree.replaced(inputs, in_indices, tensors))
                return tuple(outs[i] for i in out_indices)

            with acting_for(loop, transform_level() + 1):
                pullback = torch.func.vjp(chosen_outputs, *(inputs[i] for i in in_indices))[
                    1
                ]
                return pullback(tuple(grads))
        # Why zeros then: a higher derivative has as many results as those that transforms return,
        # which are zeros for an input that the function doesn't use, such as a frozen shard.
        has_zeros = torch.is_grad_enabled()
        is_connected_graph = has_zeros and any(
            tensor.requires_grad for tensor in (*inputs, *grads)
        )
        input_copies = []
        for tensor in inputs:
            # A view is part of the graph of higher derivatives; the copy of another input is not.
            is_connected = is_connected_graph and tensor.requires_grad
            input_copies.append(tensor.view_as(tensor) if is_connected else tensor.detach())
        chosen_inputs = [input_copies[i].requires_grad_() for i in in_indices]
        # Why without hooks: the backward of the units inside follows at once, so they stay gathered
        # until then.
        with (
            torch.enable_grad(),
            torch.autograd.graph.disable_saved_tensors_hooks(
                "fs.remat recomputes without them"
            ),
        ):
            with acting_for(loop, 0):
                outs = self.recompute(*input_copies)
            out_pairs = zip([outs[i] for i in out_indices], grads, strict=True)
            pairs_with_graph = [pair for pair in out_pairs if pair[0].requires_grad]
            if not pairs_with_graph:
                return [torch.zeros_like(x) if has_zeros else None for x in chosen_inputs]
            out_tensors, out_grads = zip(*pairs_with_graph, strict=True)
            # Note: frees the outputs of which no gradient is asked, and their graphs.
            del outs, out_pairs, pairs_with_graph
            return torch.autograd.grad(
                out_tensors,
                chosen_inputs,
                out_grads,
                allow_unused=True,
                create_graph=is_connected_graph,
                materialize_grads=has_zeros,
            )

    def duals(self, tensors: Tensors, tangents: Sequence[Any], level: int) -> Any:
        """Return all outputs and their tangents, as the transform of a level computes them."""
        in_indices = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def run(tensors: Tensors, tangents: Tensors) -> Any:
            chosen_inputs = tuple(tensors[i] for i in in_indices)

            # Why not recompute: nothing has drawn random numbers before.
            def restricted(*chosen_tensors: torch.Tensor) -> Any:
                return self.run(*tree.replaced(tensors, in_indices, chosen_tensors))

            with acting_for(self.loops.get(level), transform_level() + 1):
                return torch.func.jvp(restricted, chosen_inputs, tuple(tangents))

        with within(below(self.loops, level)), _RefuseCaptured():
            if not in_indices:
                outs = _apply_to_both(lambda tensors, _: self.run(*tensors), tensors, [])
                return outs, [None] * len(outs)
            outs, out_tangents = _apply_to_both(
                run, tensors, [tangents[i] for i in in_indices]
            )
        return outs, [t if is_continuous(t) else None for t in out_tangents]


@dataclass(frozen=True, slots=True)
class _AmbientState:
    """The random numbers and the autocast that a computation depends on."""

    random: RandomState
    autocast: AutocastSettings

    @classmethod
    def capture(cls) -> _AmbientState:
        return cls(RandomState.take(), _autocast_settings())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as exit_stack:
            # Leaving autocast clears its cache of casts, so it is left alone if nothing changes.
            if _autocast_settings() != self.autocast:
                for device_type, enabled, dtype in self.autocast:
                    exit_stack.enter_context(
                        torch.autocast(device_type, dtype=dtype, enabled=enabled)
                    )
            exit_stack.enter_context(self.random.restored())
            yield


def _autocast_settings() -> AutocastSettings:
    device_types = ["cpu"] + ["cuda"] * torch.cuda.is_initialized()
    return tuple(
        [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in device_types
        ]
    )


_CHANGED = (
    "a tensor in the arguments of a function under fs.remat was modified in place, or got other "
    "data, before backward, which computes the function again and needs the values of forward: "
    "modify a copy, and update shards after backward"
)

_WRITTEN = (
    "a function under fs.remat changed a list, dictionary or object in its arguments, which under "
    "torch.func would lose gradients: return the tensors; for a cache of transformers, pass "
    "use_cache=False"
)

_FAILED_AGAIN = (
    "raised in backward, where fs.remat computes a function again that ran in forward. If it changes "
    "an object that is no argument, such as a cache of keys and values, pass it as one; for models "
    "of transformers, pass use_cache=False"
)

_CONTAINERS = frozenset((list, dict, collections.OrderedDict, collections.defaultdict))
_CONSTANTS = frozenset((bool, int, float, str, type(None)))
_OPAQUE = (torch.Tensor, torch.nn.Module, type, types.FunctionType, types.ModuleType)

# --- captured tensors, which _Remat cannot differentiate ------------------------------------------

_CAPTURED = (
    "a function under fs.remat captured a tensor that a torch.func transform differentiates or "
    "maps over, or that requires a gradient; under transforms it is differentiated with respect "
    "to its arguments only: pass the tensor as an argument"
)


class _RefuseCaptured(torch.overrides.TorchFunctionMode):
    """Raise if the computation uses a tensor of a transform above ``_Remat``, which it captured."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for arg in (*args, *(kwargs or {}).values()):
            # torch.cat and the like take a list of tensors.
            for value in arg if isinstance(arg, (tuple, list)) else (arg,):
                is_tensor = isinstance(value, torch.Tensor)
                if (
                    is_tensor
                    and is_transformed(value)
                    and belongs_to_transform_above(value)
                ):
                    raise ValueError(_CAPTURED)
        return func(*args, **(kwargs or {}))
