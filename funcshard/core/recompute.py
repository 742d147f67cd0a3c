"""``remat``: a function that keeps its inputs only, and computes the rest again in backward.

Two ways lead there. Outside ``torch.func``, ``torch.utils.checkpoint`` does it with saved-tensor hooks. ``torch.func``
refuses those, so there one autograd Function does it: its backward is the vector-Jacobian product of the function,
computed from the inputs alone and rematerialised itself, so that it can be differentiated any number of times.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from funcshard._utils import (
    RandomState,
    belongs_to_transform_above,
    captured,
    is_transformed,
    signed,
    transforms_active,
    tree,
)
from funcshard.core.prefetcher import hooks_allowed

__all__ = ["remat"]

Tensors = Sequence[torch.Tensor]


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function into one that keeps only its inputs for backward, and computes the rest again there.

    Around a unit, ``remat(unshard(apply, unit, mesh))``, it keeps the shard and the inputs, and gathers the unit again in
    backward: what ``reshard`` does, and activation checkpointing besides, also under ``torch.func``, where
    ``reshard`` can do nothing. The second computation sees the random numbers and the autocast of the first.

    Arguments:
        f: any function of pytrees. Outside ``torch.func`` tensors that it closes over get their gradients too. Under
            transforms only its arguments can: a captured tensor that requires a gradient is an error there.

    Returns:
        A function of the same arguments and results. It may be nested, and be differentiated forwards and backwards
        any number of times, and mapped with ``vmap``.

    Raises:
        ValueError: from the function, under ``torch.func``: ``f`` captured a tensor that is being differentiated.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3, 2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.remat(fs.unshard(lambda leaves, x: (x @ leaves["w"]).sum(), plan.units[""], mesh))
        ...     return torch.func.grad(f)(fs.shard(params, plan, mesh)[""], torch.ones(1, 3))["float32"].tolist()
        >>> fs.simulate(main, world_size=2)
        [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]

    Source: ``jax.checkpoint``, also called ``jax.remat``.
    """

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return f(*args, **kwargs)
        if hooks_allowed():
            return checkpoint(functools.partial(f, **kwargs), *args, use_reentrant=False)
        _check_closure(f)
        values, unflatten = tree.flatten((args, kwargs))
        places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        rest = [None if isinstance(value, torch.Tensor) else value for value in values]

        def of_tensors(*tensors: torch.Tensor) -> Any:
            filled = list(rest)
            for i, tensor in zip(places, tensors, strict=True):
                filled[i] = tensor
            args, kwargs = unflatten(filled)
            return f(*args, **kwargs)

        return _apply(of_tensors, [values[i] for i in places])

    return run


def _apply(f: Callable[..., Any], tensors: Tensors) -> Any:
    """``f(*tensors)``, rematerialised by the Function."""
    outputs = _Outputs()

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return outputs.take(f(*tensors), tensors)

    return outputs.build(_Remat.apply(_Call(flat, _Surroundings.take()), *tensors))


@dataclass(slots=True, eq=False)
class _Outputs:
    """How the outputs of a function are put together from its tensors, each of which is there once."""

    unflatten: Callable[[Any], Any] | None = None
    rest: list[Any] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)

    def take(self, out: Any, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        values, self.unflatten = tree.flatten(out)
        known = {id(tensor) for tensor in inputs}
        tensors: dict[int, tuple[int, torch.Tensor]] = {}
        for value in values:
            if isinstance(value, torch.Tensor):
                # a Function may not return its input itself
                tensors.setdefault(id(value), (len(tensors), value.view_as(value) if id(value) in known else value))
        self.places = [tensors[id(value)][0] if isinstance(value, torch.Tensor) else None for value in values]
        self.rest = [None if isinstance(value, torch.Tensor) else value for value in values]
        return tuple(tensor for _, tensor in tensors.values())

    def build(self, tensors: Tensors) -> Any:
        assert self.unflatten is not None
        filled = [value if i is None else tensors[i] for i, value in zip(self.places, self.rest, strict=True)]
        return self.unflatten(filled)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What a computation sees besides its arguments: torch's random state, and autocast."""

    random: RandomState
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def take(cls) -> _Surroundings:
        types = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types)
        return cls(RandomState.take(), autocast)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        now = self.take()
        with contextlib.ExitStack() as stack:
            if now.autocast != self.autocast:
                for kind, enabled, dtype in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            self.random.put()
            stack.callback(now.random.put)
            yield


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of a rematerialised function, of tensors to tensors."""

    run: Callable[..., tuple[torch.Tensor, ...]]
    surroundings: _Surroundings

    def again(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run it once more, with the random numbers of the first time."""
        with self.surroundings.restored():
            return self.run(*tensors)

    def pullback(self, given: Sequence[int], wanted: Sequence[int], inputs: Tensors, grads: Tensors) -> list[Any]:
        """Gradients of the ``wanted`` inputs, from those of the ``given`` outputs."""
        if transforms_active():
            return list(torch.func.vjp(self._part(given, wanted, inputs), *(inputs[i] for i in wanted))[1](tuple(grads)))
        connected = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *grads))
        copies = [tensor.view_as(tensor) if connected and tensor.requires_grad else tensor.detach() for tensor in inputs]
        for i in wanted:
            copies[i].requires_grad_()
        # no hooks, so that units stay gathered for their backward, which follows at once
        with torch.enable_grad(), torch.autograd.graph.disable_saved_tensors_hooks("fs.remat computes again without them"):
            outs = self.again(*copies)
            pairs = [(outs[i], grad) for i, grad in zip(given, grads, strict=True) if outs[i].requires_grad]
            if not pairs:
                return [None] * len(wanted)
            tops, seeds = zip(*pairs, strict=True)
            del outs, pairs
            chosen = [copies[i] for i in wanted]
            return list(torch.autograd.grad(tops, chosen, seeds, allow_unused=True, create_graph=connected))

    def pushforward(self, given: Sequence[int], inputs: Tensors, tangents: Tensors) -> tuple[torch.Tensor, ...]:
        """Tangents of all outputs, from those of the ``given`` inputs."""
        every = self._part(None, given, inputs)
        return torch.func.jvp(every, tuple(inputs[i] for i in given), tuple(tangents))[1]

    def _part(self, outputs: Sequence[int] | None, places: Sequence[int], inputs: Tensors) -> Callable[..., Any]:
        def part(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
            filled = list(inputs)
            for i, tensor in zip(places, chosen, strict=True):
                filled[i] = tensor
            outs = self.again(*filled)
            return outs if outputs is None else tuple(outs[i] for i in outputs)

        return part


_CAPTURED = (
    "a function under fs.remat captured a tensor that a torch.func transform differentiates or maps over, or that requires "
    "a gradient; under transforms it is differentiated with respect to its arguments only: pass the tensor as an argument"
)


def _check_closure(f: Any) -> None:
    """Raise if the function closes over a tensor of a transform under way, which the Function could not see."""
    if any(isinstance(found, torch.Tensor) and is_transformed(found) for found in captured(f)):
        raise ValueError(_CAPTURED)


class _Captured(torch.overrides.TorchFunctionMode):
    """Raises where a computation at a lower level of transforms meets a tensor of a higher one, which it captured."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in (*args, *(kwargs or {}).values()):
            for each in arg if isinstance(arg, (tuple, list)) else (arg,):
                if isinstance(each, torch.Tensor) and is_transformed(each) and belongs_to_transform_above(each):
                    raise ValueError(_CAPTURED)
        return func(*args, **(kwargs or {}))


class _Remat(torch.autograd.Function):
    """``_Remat.apply(call, *tensors)`` is ``call.run(*tensors)``; it saves the tensors only."""

    @staticmethod
    @signed
    def forward(call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad(), _Captured():  # nothing here requires a gradient, unless the function captured it
            outs = call.run(*(tensor.detach() for tensor in tensors))
        if any(out.requires_grad for out in outs):
            raise ValueError(_CAPTURED)
        return outs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(out for out in output if not _differentiable(out)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        inputs = ctx.saved_tensors
        given = [i for i, grad in enumerate(grads) if grad is not None]
        wanted = [i for i, needs in enumerate(ctx.needs_input_grad[1:]) if needs]
        found = _again(functools.partial(ctx.call.pullback, given, wanted), inputs, [grads[i] for i in given])
        result = [None] * len(inputs)
        for i, grad in zip(wanted, found, strict=True):
            result[i] = grad
        return None, *result

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Any:
        inputs = ctx.saved_tensors
        given = [i for i, tangent in enumerate(tangents) if tangent is not None]
        found = _again(functools.partial(ctx.call.pushforward, given), inputs, [tangents[i] for i in given])
        return tuple(tangent if _differentiable(tangent) else None for tangent in found)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: torch.Tensor) -> Any:
        batched = torch.func.vmap(call.run, in_dims=tuple(in_dims[1:]), randomness=info.randomness)
        outs = _Remat.apply(_Call(batched, call.surroundings), *tensors)
        return outs, (0,) * len(outs)


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _again(f: Callable[..., Any], *args: Any) -> Any:
    """``f(*args)`` of two sequences of tensors, rematerialised where it may be differentiated further."""
    first, second = args
    if not torch.is_grad_enabled():
        return f(first, second)
    return _apply(lambda *tensors: f(tensors[: len(first)], tensors[len(first) :]), [*first, *second])
