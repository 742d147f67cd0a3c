"""``Hardware``: a machine as data and as JSON.

Every number of a report and of a machine has a source, which says how far you can trust it:

- ``exact``: it follows from the plan alone.
- ``traced``: it comes from the trace of forward and backward.
- ``calibrated``: it comes from a measurement of such hardware.
- ``extrapolated``: it lies outside of that measurement.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from funcshard._utils import file_data
from funcshard._utils.options import check_choice, check_count, check_number, did_you_mean
from funcshard._utils.regular_files import read_regular

SOURCES = ("exact", "traced", "calibrated", "extrapolated")

_SMALL = 0.05  # of a sum: smaller parts do not count


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure comes from.

    Attributes:
        text: a URL, or the words "measured by" and the command.
        how: ``"calibrated"`` for a measured or stated figure, ``"extrapolated"`` for one of another
            machine.
    """

    text: str
    how: str = "calibrated"

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise ValueError(
                f"source must name where a figure comes from; found {self.text!r}: give a URL or a "
                "command"
            )
        check_choice("how", self.how, SOURCES)


def weakest(*sources: str) -> str:
    """Return the least trustworthy of some sources.

    Example:
        >>> weakest("exact", "extrapolated", "traced")
        'extrapolated'
    """
    return max(sources, key=SOURCES.index, default=SOURCES[0])


def source_of_sum(parts: Iterable[tuple[float, str]]) -> str:
    """Return the weakest source of a sum's parts, but for the least twentieth of the sum.

    Arguments:
        parts: the size and the source of each part.

    Example:
        >>> source_of_sum([(1000.0, "calibrated"), (1.0, "extrapolated")])
        'calibrated'
    """
    sizes = dict.fromkeys(SOURCES, 0.0)
    for size, source in parts:
        sizes[source] += size
    total, weaker = sum(sizes.values()), 0.0
    for source in reversed(SOURCES):
        weaker += sizes[source]
        if weaker > _SMALL * total:
            return source
    return SOURCES[0]


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
        check_number(
            "bandwidth of a link", self.bandwidth, above=0, remedy="pass bytes per second"
        )


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
            "factor",
            self.factor,
            above=0,
            remedy="pass a share of the bandwidth, such as 0.87",
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
        TypeError: a figure isn't a number.
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
    flops: Mapping[str, float] = field(hash=False)
    flops_efficiency: float
    memory_efficiency: float
    kernel_overhead: float
    offload: Link
    ranks_per_node: int
    node: tuple[Link, ...]
    network: tuple[Link, ...]
    sources: Mapping[str, Source] = field(hash=False)
    size_factors: tuple[SizeFactor, ...] = ()
    about: str = ""
    aliases: tuple[str, ...] = field(default=(), compare=False)
    device: str = "cuda"
    optimizer_efficiency: float | None = None

    def __post_init__(self) -> None:
        # Why copies: the caller's dictionaries may change.
        object.__setattr__(self, "flops", dict(self.flops))
        object.__setattr__(self, "sources", dict(self.sources))
        for name in ("node", "network", "aliases"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        factors = sorted(self.size_factors, key=lambda size_factor: size_factor.bytes)
        object.__setattr__(self, "size_factors", tuple(factors))
        check_choice("device", self.device, ("cuda", "cpu"))
        check_count("memory", self.memory, of="bytes")
        check_count("ranks_per_node", self.ranks_per_node, of="ranks")
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

    def _numbers(self) -> dict[str, Any]:
        """Return every figure that isn't a link, by the key of its source."""
        numbers = {name: getattr(self, name) for name in _FIGURES}
        if self.optimizer_efficiency is not None:
            numbers["optimizer_efficiency"] = self.optimizer_efficiency
        return numbers | {f"flops.{dtype}": value for dtype, value in self.flops.items()}

    def to_json(self) -> str:
        """Return the description as JSON; ``from_json`` is the inverse."""
        names = ("name", "aliases", "about", "device")
        data: dict[str, Any] = {name: getattr(self, name) for name in names}
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
            ValueError: the text isn't JSON, or a figure is missing, out of bounds or without a
                source.
        """
        try:
            data: Any = file_data.parse(text)
            sources: dict[str, Source] = {}

            def figure(name: str, record: Mapping[str, Any]) -> Any:
                sources[name] = _source(record)
                return record["value"]

            for name in {*_FIGURES, "optimizer_efficiency"}.intersection(data):
                data[name] = figure(name, data[name])
            data["flops"] = {
                dtype: figure(f"flops.{dtype}", record)
                for dtype, record in data["flops"].items()
            }
            data["offload"] = _record(Link, data["offload"])
            for name, record_class in _LISTS.items():
                data[name] = [
                    _record(record_class, record) for record in data.get(name, ())
                ]
            return Hardware(**data, sources=sources)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                "a hardware description must have the form of those that come with funcshard; "
                f"found {type(error).__name__}: {error}"
            ) from None


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
        TypeError: ``hardware`` isn't a name, path or description.
        ValueError: neither a description nor a file has this name, or the file is damaged.

    Example:
        >>> from funcshard.estimate import load_hardware
        >>> load_hardware("h100").name
        'h100-8x400gbps'
    """
    if isinstance(hardware, Hardware):
        return hardware
    hardware_text = os.fspath(hardware)
    # Note: a name wins over a file of the same name; a Path is always a file.
    if isinstance(hardware, str) and hardware_text in _names():
        return _shipped(_names()[hardware_text])
    path = Path(hardware_text)
    if not path.is_file():
        advice = "python -m funcshard calibrate writes such a file"
        raise ValueError(
            f"hardware must be one of {', '.join(sorted(_names()))}, or the path of a JSON file; "
            f"found {hardware_text!r}: "
            + did_you_mean(hardware_text, _names(), otherwise=advice)
        )
    try:
        return Hardware.from_json(read_regular(path).decode())
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
    return names_by_alias


@functools.cache
def _shipped(name: str) -> Hardware:
    return Hardware.from_json((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _source_data(source: Source) -> dict[str, str]:
    data = {"source": source.text}
    if source.how != "calibrated":
        data["how"] = source.how
    return data


def _record(record_class: type[Any], data: Mapping[str, Any]) -> Any:
    figures = {key: value for key, value in data.items() if key not in ("source", "how")}
    return record_class(**figures, source=_source(data))


def _source(data: Mapping[str, Any]) -> Source:
    return Source(data["source"], data.get("how", "calibrated"))


def _record_data(record: Link | SizeFactor) -> dict[str, Any]:
    names = [
        class_field.name for class_field in fields(record) if class_field.name != "source"
    ]
    data = {name: getattr(record, name) for name in sorted(names, key="kind".__ne__)}
    if data.get("kind") == ALL_KINDS:  # which a link has by default
        del data["kind"]
    return data | _source_data(record.source)
