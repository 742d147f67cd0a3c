"""``Storage``: a pair of functions that stores frozen leaves small; ``nf4``, ``int8`` and ``fp8``.

A leaf is raveled, and each ``block`` of its elements becomes one record of bytes. Shards consist of
whole records, so a rank packs and unpacks its part alone. In a plan, a packed leaf is a tensor of
bytes like any other, and its buffer's ``Packing`` says what the bytes mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from funcshard._utils.options import check_count
from funcshard._utils.tensors import byte_view, dtype_name, dtype_of

Encode = Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Storage:
    """A pair of pure functions that stores frozen leaves small, for ``make_plan(storage=...)``.

    Attributes:
        encode: your function from blocks ``[n, block]``, in the dtype of the leaf, to a tensor or a
            tuple of tensors ``[n, ...]`` of any dtypes. Row ``i`` of the results depends on block
            ``i`` alone.
        decode: your function from these tensors to the blocks ``[n, block]``, of any floating-point
            dtype. The library converts them to the dtype of the leaf, and then to ``param_dtype``.
        block: number of elements of a block. The last block of a leaf is padded with zeros.
        name: the name in plans; by default that of ``encode``.

    Raises:
        TypeError: ``encode`` or ``decode`` isn't a function, or ``block`` isn't a number.
        ValueError: ``block`` isn't a whole number, or below 1.

    Example:
        >>> import torch, funcshard as fs
        >>> half = fs.Storage(torch.Tensor.half, torch.Tensor.float, name="half")
        >>> params = {"base": torch.nn.Parameter(torch.full((3, 64), 0.1), requires_grad=False)}
        >>> plan = fs.make_plan(params, 1, storage={"base": half})
        >>> fs.shard(params, plan, fs.Mesh())[""]["float32.frozen.half_64"].nbytes
        384

    Source: blocks with scales of their own are those of Dettmers et al., "8-bit Optimizers via
    Block-wise Quantization" (2021), https://arxiv.org/abs/2110.02861
    """

    encode: Encode
    decode: Callable[..., torch.Tensor]
    block: int = 64
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.encode) or not callable(self.decode):
            raise TypeError(
                "a Storage takes two functions, encode and decode; found "
                f"{self.encode!r} and {self.decode!r}: pass fs.nf4(), for example"
            )
        object.__setattr__(self, "block", check_count("block", self.block, of="elements"))
        if not self.name:
            name = getattr(self.encode, "__qualname__", type(self.encode).__qualname__)
            object.__setattr__(self, "name", name)


def nf4(block: int = 64) -> Storage:
    """Return the storage of QLoRA: 4 bits an element, and a float32 scale for each block.

    Each element becomes the nearest of 16 levels, quantiles of the normal distribution, times the
    largest magnitude of its block. The bytes of the elements are those of bitsandbytes.

    Arguments:
        block: number of elements of a block, an even number.

    Returns:
        The pair, for ``make_plan(storage=...)``.

    Example:
        >>> import torch, funcshard as fs
        >>> codec = fs.nf4(block=4)
        >>> codec.decode(*codec.encode(torch.tensor([[0.0, 1.0, -2.0, 0.9]])))
        tensor([[ 0.0000,  0.8814, -2.0000,  0.8814]])

    Source: Dettmers et al., "QLoRA" (2023), appendix E, https://arxiv.org/abs/2305.14314
    """
    block = check_count("block", block, 2, of="elements")
    if block % 2:
        raise ValueError(
            f"block must be even, because two elements share a byte; found {block}: pass {block + 1}"
        )
    return Storage(_encode_nf4, _decode_nf4, block, "nf4")


def int8(block: int = 64) -> Storage:
    """Return a storage of 8 bits an element: equal steps, and a float32 scale for each block.

    Arguments:
        block: number of elements of a block.

    Returns:
        The pair, for ``make_plan(storage=...)``.

    Example:
        >>> import torch, funcshard as fs
        >>> codec = fs.int8(block=3)
        >>> codec.encode(torch.tensor([[1.0, -2.0, 0.5]]))[0]
        tensor([[  64, -127,   32]], dtype=torch.int8)
    """
    return Storage(_encode_int8, _decode_int8, block, "int8")


def fp8(block: int = 64) -> Storage:
    """Return a storage of 8 bits an element, ``float8_e4m3fn``, and a float32 scale for each block.

    Arguments:
        block: number of elements of a block.

    Returns:
        The pair, for ``make_plan(storage=...)``.

    Example:
        >>> import torch, funcshard as fs
        >>> codec = fs.fp8(block=3)
        >>> codec.decode(*codec.encode(torch.tensor([[1.0, -2.0, 0.01]])))
        tensor([[ 1.0000, -2.0000,  0.0100]])
    """
    return Storage(_encode_fp8, _decode_fp8, block, "fp8")


# The storages that a plan's JSON names without more.
built_in = {"nf4": nf4, "int8": int8, "fp8": fp8}

# fmt: off
_NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)
# fmt: on
_INT8_MOST, _FP8_MOST = 127.0, 448.0


def _scaled(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks in float32, divided by their largest magnitudes, and these, ``[n, 1]``."""
    blocks = blocks.float()
    # Why a least one: a block of zeros stays zeros.
    scales = blocks.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return blocks / scales, scales


def _nf4_levels(device: torch.device) -> torch.Tensor:
    # Why filled: fs.trace records no tensors that a step takes from elsewhere.
    levels = [
        torch.full((), level, dtype=torch.float32, device=device) for level in _NF4_LEVELS
    ]
    return torch.stack(levels)


def _encode_nf4(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled, scales = _scaled(blocks)
    levels = _nf4_levels(blocks.device)
    bounds = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8)
    return (codes[:, 0::2] << 4) | codes[:, 1::2], scales


def _decode_nf4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    levels = _nf4_levels(codes.device).expand(16, 16)
    # Why as int64: one number for two elements is found in half the time.
    byte_levels = torch.stack([levels.t(), levels], -1).view(torch.int64).flatten()
    # Why int: torch takes no bytes as indices.
    elements = byte_levels.index_select(0, codes.flatten().int()).view(torch.float32)
    return elements.view(-1, 2 * codes.shape[1]).mul_(scales)


def _encode_int8(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled, scales = _scaled(blocks)
    return scaled.mul_(_INT8_MOST).round_().to(torch.int8), scales


def _decode_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    # Why this order: the largest element comes back exactly, so packing again gives the same bytes.
    return codes.float().div_(_INT8_MOST).mul_(scales)


def _encode_fp8(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled, scales = _scaled(blocks)
    return scaled.mul_(_FP8_MOST).to(torch.float8_e4m3fn), scales


def _decode_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.float().div_(_FP8_MOST).mul_(scales)


def step_numel(*, accelerator: bool) -> int:
    """Return how many elements are packed or decoded at a time."""
    # Why in steps: the functions make tensors of their own, which should be small beside the
    # leaves. A CPU has them in its cache, and a GPU takes long to start small operations.
    return 2**24 if accelerator else 2**18


# --- in a plan ------------------------------------------------------------------------------------


class RecordPart(NamedTuple):
    """What ``encode`` returns for one block: dtype and shape of one of its tensors."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Packing:
    """What the bytes of a buffer of packed leaves mean.

    Attributes:
        name: the name of the storage.
        block: number of elements of a block.
        dtype: name of the dtype of the leaves, as the model sees them.
        parts: what a record consists of, in this order.
        storage: the pair of functions; ``None`` in a plan from JSON, unless it is built in.
        record: bytes of a record.
    """

    name: str
    block: int
    dtype: str
    parts: tuple[RecordPart, ...]
    storage: Storage | None = field(init=False, default=None)
    record: int = field(init=False)

    def __post_init__(self) -> None:
        record = sum(part.bytes for part in self.parts)
        if self.block < 1 or record < 1 or not dtype_of(self.dtype).is_floating_point:
            raise ValueError(
                f"storage {self.name!r} must make records of blocks of a floating-point dtype; "
                f"found {record} bytes for {self.block} elements of {self.dtype}"
            )
        object.__setattr__(self, "record", record)
        if self.name in built_in:
            object.__setattr__(self, "storage", built_in[self.name](self.block))

    @classmethod
    def of(cls, storage: Storage, dtype: str) -> Packing:
        """Return the packing of leaves of a dtype; call ``encode`` and ``decode`` to know it.

        Raises:
            ValueError: the functions do not return rows for rows.
        """
        # Why two: one block would not show whether there is a row for each.
        blocks = torch.zeros(2, storage.block, dtype=dtype_of(dtype), device="cpu")
        with torch.no_grad():
            encoded = _tuple_of(storage.encode(blocks))
            if not encoded or any(len(rows) != 2 for rows in encoded):
                raise ValueError(
                    f"encode of storage {storage.name!r} must return a tensor or a tuple of tensors "
                    f"with one row for each block; found the shapes "
                    f"{[tuple(rows.shape) for rows in encoded]} for 2 blocks"
                )
            decoded = storage.decode(*encoded)
        _check_decoded(storage.name, decoded, blocks)
        parts = tuple(RecordPart(dtype_name(x.dtype), tuple(x.shape[1:])) for x in encoded)
        return cls(storage.name, storage.block, dtype, parts).with_storage(storage)

    def with_storage(self, storage: Storage) -> Packing:
        """Return the packing with the functions of a storage."""
        packing = Packing(self.name, self.block, self.dtype, self.parts)
        object.__setattr__(packing, "storage", storage)
        return packing

    @property
    def form(self) -> tuple[str, int, str, tuple[RecordPart, ...]]:
        """What two packings of the same bytes agree in: all but the functions."""
        return self.name, self.block, self.dtype, self.parts

    def bytes_of(self, numel: int) -> int:
        """Return the number of bytes of a leaf of so many elements."""
        return -(-numel // self.block) * self.record

    def numel_of(self, packed: int) -> int:
        """Return the number of elements of so many bytes, with those that pad a block."""
        return packed // self.record * self.block

    @torch.no_grad()
    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes of elements, ``[numel]``, of which the first one begins a block."""
        packed = torch.empty(
            self.bytes_of(values.numel()), dtype=torch.uint8, device=values.device
        )
        records = packed.view(-1, self.record)
        leaf_values = values.to(dtype_of(self.dtype))
        for begin, end in self._steps(len(records), values.device):
            blocks = leaf_values[begin * self.block : end * self.block]
            padding_numel = (end - begin) * self.block - blocks.numel()
            blocks = torch.nn.functional.pad(blocks, (0, padding_numel)).view(
                -1, self.block
            )
            encoded = _tuple_of(self._functions.encode(blocks))
            found = tuple(
                RecordPart(dtype_name(x.dtype), tuple(x.shape[1:])) for x in encoded
            )
            if found != self.parts or any(len(rows) != len(blocks) for rows in encoded):
                raise ValueError(
                    f"encode of storage {self.name!r} must return {self.parts} for each block, as "
                    f"planned; found {found}: return the same dtypes and shapes for all values"
                )
            record_bytes = [byte_view(rows).view(len(rows), -1) for rows in encoded]
            torch.cat(record_bytes, 1, out=records[begin:end])
        return packed

    @torch.no_grad()
    def unpack(
        self, packed: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the elements of whole records, ``[numel]``, in ``dtype`` or the leaves' dtype."""
        records, leaf_dtype = packed.view(-1, self.record), dtype_of(self.dtype)
        values = torch.empty(
            (len(records), self.block), dtype=dtype or leaf_dtype, device=packed.device
        )
        for begin, end in self._steps(len(records), packed.device):
            decoded = self._functions.decode(*self._split(records[begin:end]))
            _check_decoded(self.name, decoded, values[begin:end])
            values[begin:end] = decoded.to(leaf_dtype)
        return values.view(-1)

    def _steps(self, blocks: int, device: torch.device) -> list[tuple[int, int]]:
        step = max(step_numel(accelerator=device.type != "cpu") // self.block, 1)
        return [(begin, min(begin + step, blocks)) for begin in range(0, blocks, step)]

    def _split(self, records: torch.Tensor) -> list[torch.Tensor]:
        split_parts = records.split([part.bytes for part in self.parts], 1)
        # Why a copy: a view as another dtype must begin at a multiple of its size.
        return [
            rows.clone(memory_format=torch.contiguous_format)
            .view(dtype_of(part.dtype))
            .view(-1, *part.shape)
            for rows, part in zip(split_parts, self.parts, strict=True)
        ]

    @property
    def _functions(self) -> Storage:
        if self.storage is None:
            raise ValueError(
                f"the plan stores leaves by {self.name!r}, whose functions JSON does not hold: pass "
                "them, as in Plan.from_json(text, storage=...)"
            )
        return self.storage


def _tuple_of(encoded: Any) -> Sequence[torch.Tensor]:
    return encoded if isinstance(encoded, tuple | list) else (encoded,)


def _check_decoded(name: str, decoded: Any, blocks: torch.Tensor) -> None:
    found = type(decoded).__name__
    if isinstance(decoded, torch.Tensor):
        if decoded.shape == blocks.shape and decoded.is_floating_point():
            return
        found = f"{tuple(decoded.shape)} and {dtype_name(decoded.dtype)}"
    raise ValueError(
        f"decode of storage {name!r} must return the blocks, of shape {tuple(blocks.shape)} and a "
        f"floating-point dtype; found {found}"
    )
