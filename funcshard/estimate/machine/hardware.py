"""``Hardware``: the figures of a kind of machine, each with its source, as data; and its JSON.

The folder ``descriptions/`` beside this file holds one JSON file for each machine that ships with
funcshard. ``timing`` turns the figures into seconds.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from funcshard._utils import (
    check_choice,
    check_count,
    check_number,
    did_you_mean,
    file_data,
    read_regular,
)
from funcshard.estimate.machine.sources import Source

ALL_KINDS = "any"  # a Link of this kind serves every kind of collective
_FOLDER = Path(__file__).with_name("descriptions")


@dataclass(frozen=True, slots=True)
class Link:
    """The time of one kind of collective on one number of ranks or nodes.

    A collective takes ``latency + bytes / bandwidth`` seconds. The bandwidth is the *algorithm
    bandwidth*: the bytes of the whole buffer over the time beyond the latency.

    Attributes:
        size: number of ranks inside one node, or number of nodes. A copy to the host has 1.
        latency: seconds that a collective without data takes.
        bandwidth: bytes per second.
        source: the origin of the two figures.
        kind: kind of event, such as ``"all_gather"``; ``"any"`` for all kinds without a link of
            their own.
    """

    size: int
    latency: float
    bandwidth: float
    source: Source
    kind: str = ALL_KINDS

    def __post_init__(self) -> None:
        check_count("size of a link", self.size)
        check_number("latency of a link", self.latency, least=0, remedy="pass seconds")
        check_number("bandwidth of a link", self.bandwidth, above=0, remedy="pass bytes per second")


@dataclass(frozen=True, slots=True)
class SizeFactor:
    """The share of the network's bandwidth that messages of a size reach.

    Attributes:
        bytes: bytes that each rank contributes.
        factor: share of the bandwidth, above 0 and at most 1.
        source: the origin of the factor.
    """

    bytes: int
    factor: float
    source: Source

    def __post_init__(self) -> None:
        check_count("bytes of a size factor", self.bytes)
        check_number(
            "factor", self.factor, above=0, remedy="pass a share of the bandwidth, such as 0.87"
        )
        if self.factor > 1:
            raise ValueError(
                f"factor must be at most 1, a share of the bandwidth; found {self.factor!r}: pass "
                "at most 1"
            )


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of machine: a rank's processor and memory, and the links between ranks.

    Attributes:
        name: name of the description, such as ``"h100-8x400gbps"``: 8 GPUs a node, and a network
            card of 400 Gb/s for each.
        about: one sentence about the machine.
        memory: bytes of device memory that one rank can allocate.
        memory_bandwidth: peak bytes per second of that memory.
        flops: peak FLOP/s of one rank by name of dtype, without sparsity.
        flops_efficiency: share of the peak FLOP/s that matrix products reach.
        memory_efficiency: share of the peak bandwidth that memory-bound kernels reach.
        optimizer_efficiency: share that the optimizer's update reaches, if it is another one.
            ``None``: that of other kernels.
        kernel_overhead: seconds that each kernel takes beside its FLOPs and bytes.
        offload: copies between device and host, by bytes per second in one direction.
        ranks_per_node: number of ranks in one machine.
        node: links between ranks of one machine.
        network: links between machines, for groups with all ranks of each machine.
        size_factors: shares of the network's bandwidth by message size, small sizes first.
        sources: the origin of each figure that is no link: ``"memory"``, ``"flops.bfloat16"``.
        aliases: further names for ``load_hardware``.
        device: ``"cuda"``, or ``"cpu"`` if ranks compute and communicate on the same processor.

    Raises:
        TypeError: a figure is no number.
        ValueError: a figure is out of bounds or has no source, or links are missing.

    Example:
        >>> from funcshard.estimate import load_hardware
        >>> h100 = load_hardware("h100-8x400gbps")
        >>> h100.ranks_per_node, h100.flops["bfloat16"]
        (8, 989000000000000.0)
        >>> Hardware.from_json(h100.to_json()) == h100
        True
    """

    name: str
    memory: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    flops_efficiency: float
    memory_efficiency: float
    kernel_overhead: float
    offload: Link
    ranks_per_node: int
    node: tuple[Link, ...]
    network: tuple[Link, ...]
    sources: Mapping[str, Source]
    size_factors: tuple[SizeFactor, ...] = ()
    about: str = ""
    aliases: tuple[str, ...] = field(default=(), compare=False)
    device: str = "cuda"
    optimizer_efficiency: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"name of a hardware description must be a text; found {self.name!r}: pass a name"
            )
        # Why copies: a description is immutable, also if the caller's dictionaries change.
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        for name in ("node", "network", "size_factors", "aliases"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_choice("device", self.device, ("cuda", "cpu"))
        check_count("memory", self.memory, of="bytes")
        check_count("ranks_per_node", self.ranks_per_node, of="ranks")
        if not self.flops:
            raise ValueError(
                f"flops of {self.name!r} must name at least one dtype; found none: add 'float32'"
            )
        for name, value in self._numbers().items():
            free = name == "kernel_overhead"
            check_number(
                f"{name} of {self.name!r}",
                value,
                least=0 if free else None,
                above=None if free else 0,
            )
            if name not in self.sources:
                raise ValueError(
                    f"every figure of {self.name!r} must have a source; found none for {name}: add "
                    "one"
                )
        for name in ("flops_efficiency", "memory_efficiency", "optimizer_efficiency"):
            if (getattr(self, name) or 0) > 1:
                raise ValueError(
                    f"{name} must be at most 1, a share of the peak; found {getattr(self, name)!r}"
                )
        if self.ranks_per_node > 1 and not self.node:
            raise ValueError(
                f"{self.name!r} has {self.ranks_per_node} ranks in a node, so it must have links "
                "of a node; found none: add the latency and bandwidth of at least one number of "
                "ranks"
            )
        sizes = [size_factor.bytes for size_factor in self.size_factors]
        if sizes != sorted(set(sizes)):
            raise ValueError(
                f"size_factors must stand in order of their bytes; found {sizes}: sort them"
            )

    def __hash__(self) -> int:
        return hash(
            (
                self.name,
                self.memory,
                self.flops_efficiency,
                self.memory_efficiency,
                self.node,
                self.network,
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:  # mapping proxies cannot be pickled
        return Hardware.from_json, (self.to_json(),)

    def _numbers(self) -> dict[str, Any]:
        """Return every figure that is no link by the key of its source."""
        names = (
            _FIGURES if self.optimizer_efficiency is None else (*_FIGURES, "optimizer_efficiency")
        )
        return {name: getattr(self, name) for name in names} | {
            f"flops.{name}": dtype_flops for name, dtype_flops in self.flops.items()
        }

    def to_json(self) -> str:
        """Return the description as JSON; ``from_json`` is the inverse."""
        numbers = self._numbers()
        figures: dict[str, Any] = {
            name: {"value": value, **_source_data(self.sources[name])}
            for name, value in numbers.items()
            if not name.startswith("flops.")
        }
        figures["flops"] = {
            name: {"value": value, **_source_data(self.sources[f"flops.{name}"])}
            for name, value in self.flops.items()
        }
        figures["offload"] = _link_data(self.offload)
        figures["node"] = [_link_data(link) for link in self.node]
        figures["network"] = [_link_data(link) for link in self.network]
        figures["size_factors"] = [
            {
                "bytes": size_factor.bytes,
                "factor": size_factor.factor,
                **_source_data(size_factor.source),
            }
            for size_factor in self.size_factors
        ]
        head = {
            "name": self.name,
            "aliases": list(self.aliases),
            "about": self.about,
            "device": self.device,
        }
        return json.dumps(head | figures, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Return the description that ``to_json`` wrote.

        Raises:
            TypeError: the argument is no text.
            ValueError: the text is no JSON, a figure is missing, or it has no source.
        """
        try:
            data = file_data.parse(text)
        except ValueError as error:
            raise ValueError(
                f"a hardware description must be JSON; found {text[:40]!r} …: {error}"
            ) from None
        if not isinstance(data, dict):
            raise ValueError(
                f"a hardware description must be a JSON object; found {text[:40]!r} …: see the "
                "shipped files"
            )
        try:
            return _from_data(data)
        except TypeError as error:  # a figure is no number
            raise ValueError(str(error)) from None


def _from_data(data: dict[str, Any]) -> Hardware:
    known_fields = {class_field.name for class_field in fields(Hardware)} - {"sources"}
    if wrong := sorted(set(data) - known_fields):
        raise ValueError(
            f"a hardware description must have the fields {', '.join(sorted(known_fields))}; found "
            f"{wrong[0]!r}: " + did_you_mean(wrong[0], known_fields, otherwise="remove it")
        )
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name in (*_FIGURES, *(name for name in ("optimizer_efficiency",) if name in data)):
        values[name], sources[name] = _figure(name, _part(data, name, data))
    values["flops"] = {}
    for dtype, dtype_flops in file_data.table("flops", _part(data, "flops", data)).items():
        values["flops"][dtype], sources[f"flops.{dtype}"] = _figure(f"flops.{dtype}", dtype_flops)
    values["offload"] = _link("offload", _part(data, "offload", data))
    for name in ("node", "network"):
        values[name] = tuple(
            _link(name, link_data) for link_data in file_data.listed(name, data.get(name, []))
        )
    values["size_factors"] = tuple(
        SizeFactor(
            _part(factor_data, "bytes", factor_data),
            _part(factor_data, "factor", factor_data),
            _source("size_factors", factor_data),
        )
        for factor_data in file_data.listed("size_factors", data.get("size_factors", []))
    )
    head = {
        "about": file_data.text("about", data.get("about", "")),
        "aliases": file_data.texts("aliases", data.get("aliases", [])),
        "device": data.get("device", "cuda"),
    }
    return Hardware(name=_part(data, "name", data), sources=sources, **head, **values)


_FIGURES = (
    "memory",
    "memory_bandwidth",
    "flops_efficiency",
    "memory_efficiency",
    "kernel_overhead",
    "ranks_per_node",
)


def load_hardware(hardware: str | os.PathLike[str] | Hardware) -> Hardware:
    """Return a hardware description by its name, or from a file.

    Arguments:
        hardware: a name that ships with funcshard, such as ``"h100-8x400gbps"`` or its alias
            ``"h100"``; the path of a JSON file, such as ``calibrate`` writes; or a ``Hardware``.

    Raises:
        TypeError: ``hardware`` is no name, path or description.
        ValueError: no shipped description has the name and no file has the path; or the file is
            damaged.

    Example:
        >>> from funcshard.estimate import load_hardware
        >>> load_hardware("h100").name
        'h100-8x400gbps'
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str | os.PathLike):
        raise TypeError(
            f"hardware must be a name, a path or a Hardware; found {hardware!r}: pass "
            "'h100-8x400gbps'"
        )
    hardware_text = os.fspath(hardware)
    if isinstance(hardware, str) and hardware_text in _names():
        return _shipped(_names()[hardware_text])
    path = Path(hardware_text)
    if not path.is_file():
        raise ValueError(
            f"hardware must be one of {', '.join(hardware_names())}, one of their short names "
            f"{', '.join(sorted(set(_names()) - set(hardware_names())))}, or the path of a JSON "
            f"file; found {hardware_text!r}: "
            + did_you_mean(
                hardware_text,
                _names(),
                otherwise="python -m funcshard calibrate writes such a file",
            )
        )
    try:
        return Hardware.from_json(read_regular(path).decode())
    except UnicodeDecodeError:
        raise ValueError(
            f"{path}: a hardware description must be JSON; found bytes that are no text"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def hardware_names() -> tuple[str, ...]:
    """Return the names of the descriptions that ship with funcshard, in alphabetical order.

    Example:
        >>> from funcshard.estimate import hardware_names
        >>> "h200-8x400gbps" in hardware_names()
        True
    """
    return tuple(sorted(set(_names().values())))


@functools.cache
def _names() -> Mapping[str, str]:
    """Return the name of each shipped description by name and alias."""
    names_by_alias: dict[str, str] = {}
    for path in sorted(_FOLDER.glob("*.json")):
        names_by_alias[path.stem] = path.stem
        names_by_alias |= dict.fromkeys(
            json.loads(path.read_text(encoding="utf-8")).get("aliases", ()), path.stem
        )
    return MappingProxyType(names_by_alias)


@functools.cache
def _shipped(name: str) -> Hardware:
    return Hardware.from_json((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _part(data: Any, name: str, whole: Any) -> Any:
    if not isinstance(data, Mapping) or name not in data:
        raise ValueError(
            f"a hardware description must have {name!r}; found {_short(whole)}: add it"
        )
    return data[name]


def _figure(name: str, data: Any) -> tuple[Any, Source]:
    if not isinstance(data, Mapping) or "value" not in data:
        raise ValueError(
            f"{name} must be written as {{'value': …, 'source': …}}; found {_short(data)}: add the "
            "source"
        )
    return data["value"], _source(name, data)


def _source(name: str, data: Mapping[str, Any]) -> Source:
    if "source" not in data:
        raise ValueError(
            f"every figure must have a source; found none for {name}: add 'source' beside "
            f"{_short(data)}"
        )
    return Source(data["source"], data.get("how", "calibrated"))


def _link(name: str, data: Any) -> Link:
    file_data.table(name, data)
    return Link(
        _part(data, "size", data), _part(data, "latency", data), _part(data, "bandwidth", data), _source(name, data),
        file_data.text("kind", data.get("kind", ALL_KINDS)),
    )  # fmt: skip


def _source_data(source: Source) -> dict[str, str]:
    return {"source": source.text} | ({} if source.how == "calibrated" else {"how": source.how})


def _link_data(link: Link) -> dict[str, Any]:
    kind_data = {} if link.kind == ALL_KINDS else {"kind": link.kind}
    return {
        **kind_data,
        "size": link.size,
        "latency": link.latency,
        "bandwidth": link.bandwidth,
    } | _source_data(link.source)


def _short(data: Any) -> str:
    json_text = json.dumps(data) if isinstance(data, dict | Sequence) else repr(data)
    return json_text if len(json_text) <= 60 else f"{json_text[:57]}…"
