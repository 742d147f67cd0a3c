"""The bytes around a tensor in a file: the zip archive that ``torch.save`` writes.

An archive consists of a head, the tensor's bytes, and a tail. The head depends on the tensor's
dtype and shape alone. The tail also has the CRC-32 of the tensor's bytes, so they are written first
and need not be read twice. ``torch.load`` reads these archives, and so does every zip program.

Why not ``torch.save``: it computes the CRC-32 of the data too, but does not return it, and a
checkpoint's index needs one of the whole archive. Its writer copies the data once more as well.

Source of the format: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3 to 4.5.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
import zlib
from collections.abc import Sequence
from typing import IO

import torch

from funcshard._utils import tensor_pickle

_ALIGNMENT = 64  # of the data, counted from the archive's first byte, as torch.save aligns it
_ZIP64 = 45  # version of the format with numbers of 8 bytes
_DATE = 0x0021  # 1 January 1980, the first date of the format
_LARGE = 0xFFFFFFFF  # the number stands in a field of 8 bytes
_AFTER_DATA = 0x0008  # the CRC-32 follows the data
_NAME = b"archive/data/0"


def head_of(dtype: torch.dtype, sizes: Sequence[int]) -> bytes:
    """Return the bytes of a tensor's archive that come before its data."""
    return _around(dtype, tuple(sizes))[0]


def tail_of(dtype: torch.dtype, sizes: Sequence[int], checksum: int) -> bytes:
    """Return the bytes of a tensor's archive after its data, whose CRC-32 is ``checksum``."""
    head, listed, entries = _around(dtype, tuple(sizes))
    numbytes = math.prod(sizes) * dtype.itemsize
    descriptor = struct.pack("<4sLQQ", b"PK\x07\x08", checksum, numbytes, numbytes)
    start = len(head) + numbytes + len(descriptor)
    extra = struct.pack("<HHQQ", 1, 16, numbytes, numbytes)
    directory = listed + _listed(_NAME, checksum, _LARGE, entries[-1], _AFTER_DATA, extra)
    end = start + len(directory)
    version, count, length = _ZIP64, len(entries), len(directory)
    return b"".join(
        (
            descriptor,
            directory,
            struct.pack(
                "<4sQHHLLQQQQ",
                b"PK\x06\x06",
                44,
                version,
                version,
                0,
                0,
                count,
                count,
                length,
                start,
            ),
            struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1),
            struct.pack(
                "<4sHHHHLLH", b"PK\x05\x06", 0, 0, count, count, length, min(start, _LARGE), 0
            ),
        )
    )


def read_archive(file: IO[bytes], dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    """Return the tensor of an archive of any form that ``torch.save`` writes; run no code of it.

    Raises:
        ValueError: it is no archive of one dense tensor of this dtype and these sizes.
    """
    try:
        loaded_tensor = torch.load(file, map_location="cpu", weights_only=True)
    # Errors of any kind: the reader of pickles and zip files raises what it meets.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"no tensor that torch.save wrote: {reason}") from error
    if (
        type(loaded_tensor) not in (torch.Tensor, torch.nn.Parameter)
        or loaded_tensor.layout != torch.strided
    ):
        raise ValueError(f"found a {type(loaded_tensor).__name__} in place of a dense tensor")
    if (
        tuple(loaded_tensor.shape) != tuple(sizes)
        or loaded_tensor.dtype != dtype
        or loaded_tensor.device.type != "cpu"
    ):
        raise ValueError(
            f"found {tuple(loaded_tensor.shape)} and {loaded_tensor.dtype} in place of {tuple(sizes)} and {dtype}"
        )
    return loaded_tensor.detach()


@functools.lru_cache(maxsize=4096)  # optimizer states repeat the shapes of parameters
def _around(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes, list[int]]:
    """Return the head, its part of the directory, and the offset of each entry."""
    head, listed, entries = b"", b"", []
    small = {
        "data.pkl": tensor_pickle(dtype, sizes),
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
    }
    for name, content in small.items():
        full, checksum = f"archive/{name}".encode(), zlib.crc32(content)
        listed += _listed(full, checksum, len(content), len(head), 0, b"")
        entries.append(len(head))
        head += _local(full, checksum, len(content), 0, b"") + content
    entries.append(len(head))
    numbytes = math.prod(sizes) * dtype.itemsize
    extra = struct.pack("<HHQQ", 1, 16, numbytes, numbytes)
    padding = -(len(head) + 30 + len(_NAME) + len(extra) + 4) % _ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return head + _local(_NAME, 0, _LARGE, _AFTER_DATA, extra), listed, entries


def _local(name: bytes, checksum: int, size: int, flags: int, extra: bytes) -> bytes:
    """Return what precedes the content of an entry."""
    fields = (
        b"PK\x03\x04",
        _ZIP64,
        flags,
        0,
        0,
        _DATE,
        checksum,
        size,
        size,
        len(name),
        len(extra),
    )
    return struct.pack("<4s5H3L2H", *fields) + name + extra


def _listed(name: bytes, checksum: int, size: int, offset: int, flags: int, extra: bytes) -> bytes:
    """Return the entry of the directory at the archive's end."""
    sizes = (checksum, size, size, len(name), len(extra))
    fields = (b"PK\x01\x02", _ZIP64, _ZIP64, flags, 0, 0, _DATE, *sizes, 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3L5H2L", *fields) + name + extra


# --- checksums ------------------------------------------------------------------------------------

# A CRC-32 is the remainder of a polynomial over the integers modulo 2. Its lowest coefficient is
# the highest bit. Source: Ross Williams, A Painless Guide to CRC Error Detection Algorithms, 1993.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def joined_checksum(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two adjacent runs of bytes, from the CRC-32 of each.

    Arguments:
        first: CRC-32 of the first run.
        second: CRC-32 of the second run.
        length: number of bytes of the second run.

    Example:
        >>> joined_checksum(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
        True
    """
    return _product(_shift(length), first) ^ second


@functools.lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """Return the remainder of x to the power of the number of bits in ``length`` bytes."""
    result, square = _ONE, _ONE >> 8  # x to the power of 8
    while length:
        if length & 1:
            result = _product(square, result)
        square = _product(square, square)
        length >>= 1
    return result


def _product(one: int, other: int) -> int:
    """Return the product of two remainders."""
    result, bit = 0, _ONE
    while one:
        if one & bit:
            result ^= other
            one ^= bit
        bit >>= 1
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return result
