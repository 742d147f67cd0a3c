"""A module's random numbers in blocks: a rank draws those that its shards need, and no others.

``core.leaf_blocks`` says what a block is. ``BlockDraws`` makes tensors that take the place of
parameters while a module is reset. Such a tensor notes the operations on it, and runs them later on
some blocks. An operation that needs all elements, such as a view, makes them first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.torch_private import no_torch_function, wrapper_subclass
from funcshard.core import LeafBlocks, block_count
from funcshard.module.resets import blank_tensor

_aten = torch.ops.aten
# Operations that write every element without reading any: with random numbers, and with a constant.
_RANDOM_WRITES = {
    _aten.normal_.default, _aten.uniform_.default, _aten.exponential_.default,
    _aten.log_normal_.default, _aten.cauchy_.default, _aten.bernoulli_.float,
    _aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from"),
}  # fmt: skip
_CONSTANT_WRITES = {_aten.zero_.default, _aten.fill_.Scalar}
# Operations that change each element by itself.
_CHANGES = {
    _aten.add_.Tensor, _aten.add_.Scalar, _aten.sub_.Tensor, _aten.sub_.Scalar,
    _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar,
    _aten.pow_.Scalar, _aten.neg_.default, _aten.abs_.default, _aten.exp_.default,
    _aten.log_.default, _aten.sqrt_.default, _aten.tanh_.default, _aten.sigmoid_.default,
    _aten.erfinv_.default,
    _aten.clamp_.default, _aten.clamp_min_.default, _aten.clamp_max_.default,
}  # fmt: skip
# Operations that return the tensor itself, for autograd another one.
_SAME = {_aten.detach.default, _aten.alias.default}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


# An operation on a tensor: its function, arguments and, if it draws random numbers, the seed of the
# tensor's first block.
_Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]


@dataclass(slots=True)
class BlockDraws:
    """The seeds of the blocks that will be drawn.

    Attributes:
        device: where values are made.
        next_seed: seed of the next block.
    """

    device: torch.device
    next_seed: int

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor without memory, of which ``drawn_values`` returns the values."""
        tensor: torch.Tensor = _Drawn.of(DrawnValues(self, shape, dtype))
        return tensor


@dataclass(slots=True)
class DrawnValues:
    """The values of one tensor of ``BlockDraws``: the operations that make them.

    Attributes:
        draws: gives seeds.
        shape: the tensor's shape.
        dtype: its dtype.
        steps: the operations since one that wrote every element.
        whole: all values, if an operation needed them; then there are no steps.
    """

    draws: BlockDraws
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: list[_Step] = field(default_factory=list)
    whole: torch.Tensor | None = None

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note an operation on the tensor; return whether that was possible."""
        # Why numbers alone: a tensor or a generator among the arguments may change before the
        # operation runs.
        only_numbers = all(
            x is None or isinstance(x, int | float) for x in tree.leaves((args, kwargs))
        )
        if self.whole is not None or not only_numbers:
            return False
        if func in _RANDOM_WRITES:
            kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
            self.steps = [(func, args, kwargs, self.draws.next_seed)]
            # Note: all ranks note the same operations, so they count alike without a message.
            # Successive seeds give different streams for 2**32 blocks: torch's CPU generator reads
            # the lower 32 bits.
            self.draws.next_seed += block_count(prod(self.shape))
        elif func in _CONSTANT_WRITES:
            self.steps = [(func, args, kwargs, None)]
        elif func in _CHANGES and self.steps:
            self.steps.append((func, args, kwargs, None))
        else:
            # Note: a change before any write runs on the NaN of ``make_whole``, and shows.
            return False
        return True

    def make_whole(self) -> torch.Tensor:
        """Make all values, on which operations run from here on."""
        if self.whole is None:
            all_values = blank_tensor(self.shape, self.dtype, self.draws.device)
            if self.steps:
                self.blocks.write(all_values.view(-1), 0)
            self.whole, self.steps = all_values, []
        return self.whole

    def assign(self, values: torch.Tensor) -> None:
        drawn = drawn_values(values)
        if drawn is not self:
            self.whole, self.steps = (
                values.detach() if drawn is None else drawn.make_whole(),
                [],
            )

    def fill(self, values: torch.Tensor, block: int, generator: torch.Generator) -> None:
        """Write the values of one block."""
        for func, args, kwargs, seed in self.steps:
            if seed is None:
                func(values, *args, **kwargs)
            else:
                func(values, *args, **kwargs, generator=generator.manual_seed(seed + block))

    @property
    def blocks(self) -> LeafBlocks:
        """The tensor's blocks."""
        return LeafBlocks(self.shape, self.dtype, self.draws.device, self.fill)

    def digest(self) -> torch.Tensor:
        """Return a tensor that differs on two ranks if their values do."""
        steps = repr([(str(func), *arguments) for func, *arguments in self.steps])
        digest = hashlib.sha256(steps.encode()).digest()
        return torch.tensor(list(digest), dtype=torch.uint8, device="cpu")


class _Drawn(torch.Tensor):
    """The tensor that a reset writes: without memory, it tells ``drawn`` of each operation."""

    drawn: DrawnValues

    @classmethod
    def of(cls, values: DrawnValues) -> Any:
        tensor = wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.draws.device
        )
        tensor.drawn = values
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"tensor of shape {tuple(self.shape)} that is drawn in blocks"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == _SET_DATA:  # which torch refuses for tensors of two classes
            args[0].drawn.assign(args[1])
            return None
        return no_torch_function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first_arg = args[0] if args else None
        if isinstance(first_arg, cls):
            if func in _SAME:
                return cls.of(first_arg.drawn)
            if first_arg.drawn.note(func, args[1:], kwargs):
                return first_arg
        result = func(*_whole(args), **_whole(kwargs))
        if isinstance(first_arg, cls) and result is first_arg.drawn.whole:
            return first_arg  # an operation in place returns the tensor that it wrote
        return result


def drawn_values(tensor: Any) -> DrawnValues | None:
    """Return the values of a tensor of ``BlockDraws``, else ``None``."""
    return tensor.drawn if isinstance(tensor, _Drawn) else None


def _whole(values: Any) -> Any:
    return tree.map(lambda x: x.drawn.make_whole() if isinstance(x, _Drawn) else x, values)
