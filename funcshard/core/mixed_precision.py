"""Cast a unit's inputs and outputs as its ``MixedPrecision`` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from funcshard._utils import cast_tree, tensors_in
from funcshard.plan import MixedPrecision

__all__ = ["cast_inputs", "run_in_full_precision"]


def cast_inputs(precision: MixedPrecision | None, root: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return a unit's positional and keyword inputs in the dtype that its precision asks for.

    Arguments:
        precision: the unit's, or the plan's for a root that owns nothing; ``None`` leaves everything as it is.
        root: whether these are the inputs of the whole model.
        args: the positional inputs.
        kwargs: the keyword inputs.
    """
    if precision is None or precision.param_dtype is None:
        return args, kwargs
    if not (precision.cast_forward_inputs or (root and precision.cast_root_forward_inputs)):
        return args, kwargs
    return cast_tree((args, kwargs), precision.param_dtype)


def run_in_full_precision(dtype: torch.dtype, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return ``run(*args, **kwargs)`` with inputs cast to ``dtype``, and outputs back to what the first input was."""
    before = next((x.dtype for x in tensors_in((args, kwargs)) if x.is_floating_point()), None)
    args, kwargs = cast_tree((args, kwargs), dtype)
    out = run(*args, **kwargs)
    return out if before is None else cast_tree(out, before)
