from __future__ import annotations

import json
import pickle

import pytest

from funcshard.estimate import Hardware, Link, Source, hardware_names, load_hardware
from funcshard.estimate.machine.hardware import _FOLDER, SizeFactor
from funcshard.estimate.machine.timing import update_time

HERE = Source("a test")
NUMBERS = ("memory", "memory_bandwidth", "flops_efficiency", "memory_efficiency", "kernel_overhead", "ranks_per_node")


def small(**changes):
    values = {
        "name": "small", "memory": 1000, "memory_bandwidth": 100.0, "flops": {"float32": 10.0}, "flops_efficiency": 0.5,
        "memory_efficiency": 0.8, "kernel_overhead": 0.0, "offload": Link(1, 0.0, 50.0, HERE), "ranks_per_node": 2,
        "node": [Link(2, 1.0, 20.0, HERE)], "network": [Link(2, 3.0, 10.0, HERE)],
        "size_factors": [SizeFactor(10, 0.5, HERE), SizeFactor(100, 0.9, Source("elsewhere", "extrapolated"))],
        "sources": dict.fromkeys((*NUMBERS, "flops.float32"), HERE),
    }  # fmt: skip
    return Hardware(**values | changes)


@pytest.mark.parametrize("name", hardware_names())
def test_a_shipped_file_has_its_own_name_and_is_what_to_json_writes(name):
    hardware = load_hardware(name)
    assert hardware.name == name
    assert (_FOLDER / f"{name}.json").read_text() == hardware.to_json()
    again = Hardware.from_json(hardware.to_json())
    assert again == hardware == pickle.loads(pickle.dumps(hardware))
    assert hash(again) == hash(hardware)


def test_a_path_and_a_description_load_too(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(small().to_json())
    assert load_hardware(path) == load_hardware(str(path)) == load_hardware(small()) == small()


def test_the_optimizer_may_have_an_efficiency_of_its_own():
    both = small(optimizer_efficiency=0.9, sources={**small().sources, "optimizer_efficiency": HERE})
    assert Hardware.from_json(both.to_json()) == both != small()
    assert update_time(small(), 720).seconds == 9.0  # 100 bytes per second, at 0.8
    assert update_time(both, 720).seconds == 8.0
    assert "optimizer_efficiency" not in small().to_json()  # files without it stay as they are


def test_a_description_does_not_change_with_the_callers_dictionary():
    flops = {"float32": 10.0}
    hardware = small(flops=flops)
    flops["float32"] = 1.0
    assert hardware.flops == {"float32": 10.0}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"must be one of a100, .*h200-8x400gbps.*found 'h10': did you mean 'h100'\?"):
        load_hardware("h10")
    with pytest.raises(ValueError, match=r"found 'no/such\.json': python -m funcshard calibrate writes such a file"):
        load_hardware("no/such.json")
    with pytest.raises(TypeError, match=r"os\.PathLike object, not int"):
        load_hardware(3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory": 0}, "memory must be a whole number of bytes, at least 1; found 0"),
        ({"memory_bandwidth": -1.0}, "memory_bandwidth of 'small' must be a finite number above 0; found -1.0"),
        ({"flops": {"float16": 1.0}}, "must have a source; found none for flops.float16: add one"),
        ({"flops_efficiency": 1.2}, "flops_efficiency must be at most 1, a share of the peak; found 1.2"),
    ],
)
def test_wrong_figures(changes, words):
    with pytest.raises(ValueError, match=words):
        small(**changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["memory"].pop("source"), "found KeyError: 'source'"),
        (lambda data: data.update(memory=7), "have the form of those that come with funcshard; found TypeError"),
        (lambda data: data["node"][0].update(source=" "), "source must name where a figure comes from; found ' '"),
        (lambda data: data["offload"].update(how="guessed"), "how must be 'exact', .* or 'extrapolated'; found 'guessed'"),
        (lambda data: data.update(memroy=1), "found TypeError: .*'memroy'"),
        (lambda data: data.update(flops=[1]), "found AttributeError"),
    ],
)
def test_damaged_json(change, words):
    data = json.loads(small().to_json())
    change(data)
    with pytest.raises(ValueError, match=words):
        Hardware.from_json(json.dumps(data))
