"""``fake_tensors``: tensors with shapes, dtypes and storages, but no data.

torch finds the form of each result in Python, which takes half a millisecond. A trace calls the
same operators on the same forms hundreds of times, so this mode keeps the forms of results.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from funcshard._utils.torch_private import asks_for_data, is_zero_tensor, storage_id
from funcshard._utils.tree import map_tensors, tensors_in

_MOST_CONSTANTS = 1 << 20  # elements of a tensor that a trace computes

# By operator and the forms of its arguments: the class of its results, and a recipe of each.
# Note: a memo, as functools.cache: forms follow from forms alone. Planning T5 fills 727 entries.
_known: dict[Hashable, tuple[type | None, tuple[Any, ...]]] = {}

_PLAIN = frozenset({
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
_UNKNOWN_TAGS = (
    torch.Tag.inplace_view,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


without_function_modes: Any = torch._C.DisableTorchFunction
"""A context in which torch asks no modes of functions, as it does at each look at a form."""


class _NotPlainError(Exception):
    """An argument has more than a form."""


def fake_tensors() -> Any:
    """Return a context in which tensors have shapes, dtypes and storages, but no data.

    They behave as CPU tensors do. Small whole numbers that depend on no input have their values,
    because a model may decide by them.
    """
    mode = _FakeTensors(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # torch's own memory of results, which takes longer to ask
    return mode


class _FakeTensors(FakeTensorMode):
    """Fake tensors that compute whole numbers from constants, and remember forms of results."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Why: the wrapper that torch would put around each operation imports Dynamo.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})
    ) -> Any:
        kwargs = kwargs or {}
        with without_function_modes():
            try:
                key = self._key(func, args, kwargs)
            except _NotPlainError:
                return self._computed(func, types, args, kwargs)
            if (recipe := _known.get(key)) is not None:
                return self._again(*recipe, args)
        out = self._computed(func, types, args, kwargs)
        with without_function_modes():
            recipe = self._recipe(func, args, kwargs, out)
        if recipe is not None:
            _known[key] = recipe
        return out

    def _computed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is _choose_attention:
            # Why: of tensors without data torch would always choose plain operations.
            inputs = [_smaller(tensor, keep=1) for tensor in args[:3]]
            rest, options = map_tensors(_smaller, (args[3:], dict(kwargs)))
            return func(*inputs, *rest, **options)
        # Why: torch 2.14 reads numbers, and the tangent of one is a zero without data.
        args, kwargs = map_tensors(_with_data, (args, dict(kwargs)))
        is_constant = not types and all(
            type(tensor) is torch.Tensor and _is_constant(tensor)
            for tensor in tensors_in((args, kwargs))
        )
        if not is_constant or not _may_compute(func):
            return self.dispatch(func, types, args, kwargs)
        fake_args, fake_kwargs = args, kwargs
        if func._schema.is_mutable:
            # Why copies: of real tensors torch's mode runs additions and the like itself.
            fake_args, fake_kwargs = map_tensors(torch.clone, (args, kwargs))
        try:
            out = self.dispatch(func, types, fake_args, fake_kwargs)
        except Exception as error:
            if asks_for_data(error):
                return func(*args, **kwargs)
            raise
        return func(*args, **kwargs) if all(map(_is_constant, tensors_in(out))) else out

    # --- forms of results -------------------------------------------------------------------------

    def _key(self, func: Any, args: Any, kwargs: Any) -> Hashable:
        return (
            func,
            torch.get_default_dtype(),
            torch.is_inference_mode_enabled(),
            *map(self._form, args),
            *[(name, self._form(value)) for name, value in kwargs.items()],
        )

    def _form(self, value: Any) -> Hashable:
        """Return all of an argument that the forms of results may depend on."""
        value_type = type(value)
        if value_type is FakeTensor:
            if not self._is_plain(value):
                raise _NotPlainError
            return (
                value.shape,
                value.stride(),
                value.dtype,
                value.storage_offset(),
                value.untyped_storage().nbytes(),
                value.fake_device,
                value.requires_grad,
            )
        if value_type in _PLAIN:
            return value_type, value  # as 1, 1.0 and True are equal
        if value_type is list or value_type is tuple:
            return value_type, *map(self._form, value)
        raise _NotPlainError

    def _is_plain(self, tensor: Any) -> bool:
        return (
            tensor.fake_mode is self
            and tensor.constant is None
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        )

    def _recipe(
        self, func: Any, args: Any, kwargs: Any, out: Any
    ) -> tuple[type | None, tuple[Any, ...]] | None:
        """Return how to make results of the same form, or ``None`` if another call may differ."""
        if func.namespace not in ("aten", "prims") or any(
            tag in func.tags for tag in _UNKNOWN_TAGS
        ):
            return None
        results = out if isinstance(out, (list, tuple)) else (out,)
        storages = [storage_id(tensor) for tensor in tensors_in((args, kwargs))]
        recipes: list[Any] = []
        for result in results:
            place = next((i for i, arg in enumerate(args) if arg is result), None)
            if result is None or place is not None:
                recipes.append(place)
                continue
            if (
                type(result) is not FakeTensor
                or not self._is_plain(result)
                or result.requires_grad
            ):
                return None
            storage = storage_id(result)
            form = tuple(result.shape), result.stride(), result.dtype
            place = next(
                (
                    i
                    for i, arg in enumerate(args)
                    if isinstance(arg, torch.Tensor) and storage_id(arg) == storage
                ),
                None,
            )
            if place is None:
                size = torch.empty_strided(*form[:2], dtype=form[2], device="meta")
                # Note: results in one storage, or in that of a tensor in a list, are rare.
                if (
                    storage in storages
                    or result.storage_offset()
                    or size.untyped_storage().nbytes() != result.untyped_storage().nbytes()
                ):
                    return None
                storages.append(storage)
            recipes.append((*form, result.fake_device, place, result.storage_offset()))
        container: type | None = None
        if results is out:  # as torch's named tuples take no list of results
            container = list if isinstance(out, list) else tuple
        return container, tuple(recipes)

    def _again(self, container: type | None, recipes: tuple[Any, ...], args: Any) -> Any:
        results: list[Any] = []
        with in_kernel_invocation_manager(self):
            for recipe in recipes:
                if not isinstance(recipe, tuple):
                    results.append(None if recipe is None else args[recipe])
                    continue
                shape, stride, dtype, device, place, offset = recipe
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                if place is not None:
                    tensor.set_(args[place].untyped_storage(), offset, shape, stride)
                results.append(self._fake(tensor, device))
        return results[0] if container is None else container(results)

    def _fake(self, tensor: torch.Tensor, device: torch.device) -> Any:
        """Return a fake tensor on a device, with the storage of one on meta."""
        state = self.__dict__.setdefault("states", {}).get(device)
        if state is None:
            fake_tensor = FakeTensor(self, tensor, device)
            self.__dict__["states"][device] = dict(fake_tensor.__dict__)
            return fake_tensor
        # Why by hand: all fake tensors of a device begin with the same attributes, and setting them
        # one by one takes longer than all else here.
        fake_tensor = torch.Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake_tensor)
        fake_tensor.__dict__.update(state)
        return fake_tensor


_choose_attention = torch.ops.aten._fused_sdp_choice.default


def _with_data(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() or type(tensor) is not torch.Tensor or not is_zero_tensor(tensor):
        return tensor
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device)


def _smaller(tensor: torch.Tensor, keep: int = 0) -> torch.Tensor:
    """Return zeros like a tensor, with at most two in each dim but the last ``keep`` ones."""
    last_dims = tensor.shape[tensor.dim() - keep :]
    first_dims = [min(size, 2) for size in tensor.shape[: tensor.dim() - keep]]
    return torch.zeros([*first_dims, *last_dims], dtype=tensor.dtype, device="cpu")


@functools.cache
def _may_compute(func: Any) -> bool:
    """Return whether an operator gives the same values in each call."""
    return (
        func.namespace == "aten"
        and "empty" not in str(func)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _is_constant(tensor: torch.Tensor) -> bool:
    is_integral = not tensor.is_floating_point() and not tensor.is_complex()
    return is_integral and tensor.device.type == "cpu" and tensor.numel() <= _MOST_CONSTANTS
