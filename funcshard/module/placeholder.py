"""The placeholder: a module's tensor for a parameter while its unit is not gathered."""

from __future__ import annotations

from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.torch_private import graph_task_id, no_torch_function, wrapper_subclass
from funcshard.plan import BufferPlan, LeafSpec, UnitPlan


def placeholder(
    leaf: LeafSpec, buffer: BufferPlan, unit: UnitPlan, device: torch.device
) -> torch.Tensor:
    """Return a tensor with the shape, dtype and device of the gathered leaf, but without values.

    Code that computes with it gets an error with the parameter's path and its unit.
    """
    tensor: Any = wrapper_subclass(
        _Placeholder,
        leaf.shape_in_module,
        unit.computed_dtype(buffer),
        device,
        requires_grad=buffer.trainable,
    )
    tensor.leaf, tensor.unit = leaf.path, unit.title
    return tensor


class _Placeholder(torch.Tensor):
    leaf: str
    unit: str
    funcshard_placeholder = True  # a plan may be made from placeholders

    __torch_function__ = no_torch_function

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        if requires_grad == self.requires_grad:
            return self
        raise ValueError(
            f"forward set requires_grad={requires_grad} of parameter {self.leaf!r}, and the plan "
            "decides which parameters are trained: freeze it before make_functional, or use its "
            "detach() in forward"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"placeholder of {self.leaf!r} in unit {self.unit!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Why an error: the alternatives are to compute with garbage, or to gather the unit in a
        # collective that the plan does not predict.
        tensor = next(x for x in tree.leaves((args, kwargs)) if isinstance(x, cls))
        if graph_task_id() != -1:
            raise ValueError(
                f"parameter {tensor.leaf!r} was read (by {func}) outside the forward of unit "
                f"{tensor.unit!r}, in backward: torch.utils.checkpoint inside a unit works with "
                "use_reentrant=False and outside of torch.func transforms; let fully_shard(..., "
                "remat=True) compute the unit again"
            )
        raise ValueError(
            f"parameter {tensor.leaf!r} was read (by {func}) outside the forward of unit "
            f"{tensor.unit!r}, which owns it, and is gathered only during that forward (hooks of "
            "the unit's own module run before or after it); call the unit's module, choose units "
            "so that one unit contains every use of the parameter, or, if another method of the "
            f"unit's module read it, name that in fully_shard(..., methods={{unit: [name]}})"
        )
