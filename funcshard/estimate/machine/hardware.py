"""``Hardware``: a machine as data and as JSON."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from funcshard._utils import file_data
from funcshard._utils.options import check_choice, check_count, check_number, did_you_mean
from funcshard._utils.regular_files import read_regular
from funcshard.estimate.machine.sources import Source

ALL_KINDS = "any"  # a Link of this kind serves every kind of collective
_FOLDER = Path(__file__).with_name("descriptions")


@dataclass(frozen=True, slots=True)
class Link:
    """The time of one kind of collective on one number of ranks or nodes.

    A collective takes ``latency + bytes / bandwidth`` seconds. The bandwidth is the *algorithm
    bandwidth*: the bytes of the whole buffer over the time beyond the latency.

    Attributes:
        size: number of ranks in a node, or of nodes; 1 for a copy to the host.
        latency: seconds of a collective without data.
        bandwidth: bytes per second.
        source: their origin.
        kind: kind of event, such as ``"all_gather"``; ``"any"`` for all kinds without a link.
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
        name: such as ``"h100-8x400gbps"``: 8 GPUs a node, each with a network card of 400 Gb/s.
        about: one sentence about the machine.
        memory: bytes of device memory that one rank can allocate.
        memory_bandwidth: peak bytes per second of that memory.
        flops: peak FLOP/s of one rank by name of dtype, without sparsity.
        flops_efficiency: share of the peak FLOP/s that matrix products reach.
        memory_efficiency: share of the peak bandwidth that memory-bound kernels reach.
        optimizer_efficiency: share that the optimizer's update reaches; ``None``:
            ``memory_efficiency``.
        kernel_overhead: seconds that each kernel takes beside its FLOPs and bytes.
        offload: copies between device and host, by bytes per second in one direction.
        ranks_per_node: number of ranks in one machine.
        node: links between ranks of one machine.
        network: links between machines, for groups with all ranks of each machine.
        size_factors: shares of the network's bandwidth by message size, small sizes first.
        sources: the origin of each figure but links: ``"memory"``, ``"flops.bfloat16"``.
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
            figure_label = f"{name} of {self.name!r}"
            if name == "kernel_overhead":
                check_number(figure_label, value, least=0)
            else:
                check_number(figure_label, value, above=0)
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
        factor_sizes = [size_factor.bytes for size_factor in self.size_factors]
        if factor_sizes != sorted(set(factor_sizes)):
            raise ValueError(
                f"size_factors must stand in order of their bytes; found {factor_sizes}: sort them"
            )

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.flops_efficiency, self.node, self.network))

    def __reduce__(self) -> tuple[Any, ...]:  # mapping proxies cannot be pickled
        return Hardware.from_json, (self.to_json(),)

    def _numbers(self) -> dict[str, Any]:
        """Return every figure that is no link, by the key of its source."""
        numbers = {name: getattr(self, name) for name in _FIGURES}
        if self.optimizer_efficiency is not None:
            numbers["optimizer_efficiency"] = self.optimizer_efficiency
        return numbers | {f"flops.{dtype}": value for dtype, value in self.flops.items()}

    def to_json(self) -> str:
        """Return the description as JSON; ``from_json`` is the inverse."""
        data: dict[str, Any] = {
            "name": self.name,
            "aliases": self.aliases,
            "about": self.about,
            "device": self.device,
        }
        for name, value in self._numbers().items():
            # Note: a figure is written beside its source; those of dtypes have their own table.
            table_name, _, dtype = name.rpartition(".")
            table = data.setdefault(table_name, {}) if table_name else data
            table[dtype] = {"value": value, **_source_data(self.sources[name])}
        data["offload"] = _record_data(self.offload)
        for name in _LISTS:
            data[name] = [_record_data(record) for record in getattr(self, name)]
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

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
            raise ValueError(f"a hardware description must be a JSON object; found {text[:40]!r} …")
        try:
            return _from_data(data)
        except TypeError as error:  # a figure is no number
            raise ValueError(str(error)) from None


def _from_data(data: dict[str, Any]) -> Hardware:
    known_fields = {class_field.name for class_field in fields(Hardware)} - {"sources"}
    if wrong_fields := sorted(set(data) - known_fields):
        raise ValueError(
            f"a hardware description must have the fields {', '.join(sorted(known_fields))}; found "
            f"{wrong_fields[0]!r}: "
            + did_you_mean(wrong_fields[0], known_fields, otherwise="remove it")
        )
    values: dict[str, Any] = {"name": _part(data, "name"), "flops": {}}
    sources: dict[str, Source] = {}
    optional_figures = {"optimizer_efficiency"}.intersection(data)
    for name in (*_FIGURES, *optional_figures):
        values[name], sources[name] = _figure(name, _part(data, name))
    for dtype, figure in file_data.table("flops", _part(data, "flops")).items():
        values["flops"][dtype], sources[f"flops.{dtype}"] = _figure(f"flops.{dtype}", figure)
    values["offload"] = _record(Link, "offload", _part(data, "offload"))
    for name, record in _LISTS.items():
        records = file_data.listed(name, data.get(name, []))
        values[name] = tuple(_record(record, name, record_data) for record_data in records)
    return Hardware(
        sources=sources,
        about=file_data.text("about", data.get("about", "")),
        aliases=file_data.texts("aliases", data.get("aliases", [])),
        device=data.get("device", "cuda"),
        **values,
    )


_FIGURES = (
    "memory",
    "memory_bandwidth",
    "flops_efficiency",
    "memory_efficiency",
    "kernel_overhead",
    "ranks_per_node",
)
_LISTS: Mapping[str, type[Link | SizeFactor]] = {
    "node": Link,
    "network": Link,
    "size_factors": SizeFactor,
}


def load_hardware(hardware: str | os.PathLike[str] | Hardware) -> Hardware:
    """Return a hardware description by its name, or from your file.

    Arguments:
        hardware: a shipped name such as ``"h100-8x400gbps"``, or its alias ``"h100"``; the path of
            a JSON file, such as ``calibrate`` writes; or a ``Hardware``.

    Raises:
        TypeError: ``hardware`` is no name, path or description.
        ValueError: neither a description nor a file has this name, or the file is damaged.

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
    # Note: a name wins over a file of the same name; a Path is always a file.
    if isinstance(hardware, str) and hardware_text in _names():
        return _shipped(_names()[hardware_text])
    path = Path(hardware_text)
    if not path.is_file():
        shipped_names, all_names = hardware_names(), _names()
        short_names = sorted(all_names.keys() - set(shipped_names))
        advice = "python -m funcshard calibrate writes such a file"
        raise ValueError(
            f"hardware must be one of {', '.join(shipped_names)}, one of their short names "
            f"{', '.join(short_names)}, or the path of a JSON file; found {hardware_text!r}: "
            + did_you_mean(hardware_text, all_names, otherwise=advice)
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
    """Return the names of the descriptions that ship with funcshard, sorted.

    Example:
        >>> from funcshard.estimate import hardware_names
        >>> "h200-8x400gbps" in hardware_names()
        True
    """
    return tuple(sorted(set(_names().values())))


@functools.cache
def _names() -> Mapping[str, str]:
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


def _part(data: Mapping[str, Any], name: str) -> Any:
    if name not in data:
        raise ValueError(f"a hardware description must have {name!r}; found {data!r:.60}: add it")
    return data[name]


def _figure(name: str, data: Any) -> tuple[Any, Source]:
    if not isinstance(data, Mapping) or "value" not in data:
        raise ValueError(
            f"{name} must be written as {{'value': …, 'source': …}}; found {data!r:.60}: add the "
            "source"
        )
    return data["value"], _source(name, data)


def _source(name: str, data: Mapping[str, Any]) -> Source:
    if "source" not in data:
        raise ValueError(
            f"every figure must have a source; found none for {name}: add 'source' beside "
            f"{data!r:.60}"
        )
    return Source(data["source"], data.get("how", "calibrated"))


def _source_data(source: Source) -> dict[str, str]:
    data = {"source": source.text}
    if source.how != "calibrated":
        data["how"] = source.how
    return data


def _record(record: type[Any], name: str, data: Any) -> Any:
    file_data.table(name, data)
    record_figures = {key: _part(data, key) for key in _figures_of(record)}
    # Note: a link without a kind serves all kinds.
    kind = {"kind": file_data.text("kind", data["kind"])} if "kind" in data else {}
    return record(**record_figures, **kind, source=_source(name, data))


def _record_data(record: Link | SizeFactor) -> dict[str, Any]:
    kind = getattr(record, "kind", ALL_KINDS)
    data = {} if kind == ALL_KINDS else {"kind": kind}
    record_figures = {key: getattr(record, key) for key in _figures_of(type(record))}
    return {**data, **record_figures, **_source_data(record.source)}


def _figures_of(record: type[Link | SizeFactor]) -> list[str]:
    names = [class_field.name for class_field in fields(record)]
    return [name for name in names if name not in ("source", "kind")]
