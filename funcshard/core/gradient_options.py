"""The options that ``value_and_grad`` and ``accumulate`` share, with their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils.options import check_flag, check_number, outline
from funcshard.comm import Mesh, check_once, text_of
from funcshard.core.flat_buffer import views
from funcshard.core.grad_reducer import OnGrad
from funcshard.plan import BufferPlan, Reduce

# on_grads(unit, {path: gradient}) -> {path: gradient} of those to replace, or None.
OnGrads = Callable[[str, dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | None]
# on_reduce_scattered(unit, buffer key, sum) -> the tensor to reduce in its place, or None.
OnReduceScattered = Callable[[str, str, torch.Tensor], torch.Tensor | None]

_HOOKS = {
    "on_grads": "a unit's name and its gradients",
    "on_reduce_scattered": "a unit's name, the key of a buffer and a 1-D tensor",
}


# Options that decide what a rank sends. Functions and flags for errors may differ.
_COMPARED = ("has_aux", "weighted", "reduce", "divisor")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOptions:
    """How a loss and its gradient are computed.

    Attributes:
        mesh: the ranks that the mean runs over, if they are given.
        has_aux: whether the loss function returns ``aux`` too.
        weighted: whether it returns a weight.
        reduce: when the gradients of micro-batches are reduced; see ``accumulate``.
        on_grads: called before each reduction.
        on_reduce_scattered: called between the stages of each reduction.
        divisor: the divisor of all gradients, in place of the number of ranks or the weights.
        allow_constant: whether a loss that depends on no trainable shard is no error.
    """

    mesh: Mesh | None = None
    has_aux: bool = False
    weighted: bool = False
    reduce: Reduce = "each"
    on_grads: OnGrads | None = None
    on_reduce_scattered: OnReduceScattered | None = None
    divisor: float | None = None
    allow_constant: bool = False

    def __post_init__(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise TypeError(
                f"mesh must be a Mesh, or None; found {type(self.mesh).__name__}: pass the result "
                "of init_mesh, by name"
            )
        for option_name in ("has_aux", "weighted", "allow_constant"):
            check_flag(option_name, getattr(self, option_name))
        for option_name, parameters in _HOOKS.items():
            hook = getattr(self, option_name)
            if hook is not None and not callable(hook):
                raise TypeError(
                    f"{option_name} must be a function of {parameters}, or None; found {hook!r}"
                )
        if self.divisor is not None:
            check_number(
                "divisor",
                self.divisor,
                above=0,
                none="for the number of ranks",
                remedy="pass 1 for the sum over ranks",
            )
            object.__setattr__(self, "divisor", float(self.divisor))

    def compare(self, called: str, **others: Any) -> None:
        """Raise if ranks differ in these options, or in ``others`` of the function ``called``."""
        if self.mesh is not None:
            own_options = {name: getattr(self, name) for name in _COMPARED}
            texts = {name: text_of(value) for name, value in {**others, **own_options}.items()}
            check_once(self.mesh, texts, called)


# --- functions of the user that see gradients -----------------------------------------------------


def gradient_hook(on_grads: OnGrads) -> OnGrad:
    """Return the function through which a ``GradReducer`` calls ``on_grads``."""

    @torch.no_grad()
    def call(unit: str, buffer: BufferPlan, full: torch.Tensor) -> None:
        leaf_paths = [leaf.path for leaf in buffer.leaves]
        grad_views = dict(zip(leaf_paths, views(full, buffer), strict=True))
        replaced_grads = on_grads(unit, dict(grad_views))
        if replaced_grads is None:
            return
        unit_title = unit or "(root)"
        unknown_paths: Any = outline(replaced_grads)
        if isinstance(replaced_grads, Mapping):
            unknown_paths = sorted(replaced_grads.keys() - grad_views.keys())
        if unknown_paths:
            raise ValueError(
                f"on_grads must return None, or a dictionary from paths of unit {unit_title!r} to "
                f"gradients; found {unknown_paths}, the paths are {leaf_paths[:6]}"
            )
        for path, grad in replaced_grads.items():
            if grad.shape != grad_views[path].shape:
                raise ValueError(
                    f"on_grads must return gradients of their leaves' shapes; for {path!r} of unit "
                    f"{unit_title!r} found {tuple(grad.shape)} instead of "
                    f"{tuple(grad_views[path].shape)}"
                )
            if grad is not grad_views[path]:
                grad_views[path].copy_(grad)

    return call


def scattered_hook(on_reduce_scattered: OnReduceScattered) -> OnGrad:
    """Return the function through which a ``GradReducer`` calls ``on_reduce_scattered``."""

    @torch.no_grad()
    def call(unit: str, buffer: BufferPlan, partial: torch.Tensor) -> None:
        replaced_sum = on_reduce_scattered(unit, buffer.key, partial)
        if replaced_sum is None or replaced_sum is partial:
            return
        if not isinstance(replaced_sum, torch.Tensor) or replaced_sum.shape != partial.shape:
            raise ValueError(
                "on_reduce_scattered must return None, or a tensor of the shape that it got; for "
                f"buffer {buffer.key!r} of unit {unit or '(root)'!r} found {outline(replaced_sum)} "
                f"instead of {tuple(partial.shape)}"
            )
        partial.copy_(replaced_sum)

    return call
