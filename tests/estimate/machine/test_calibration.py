from __future__ import annotations

import json

import pytest

import funcshard as fs
from funcshard.estimate import Source, calibrate, collective_time, load_hardware
from funcshard.estimate.machine import compute_time
from funcshard.estimate.machine.calibration import Reference, _describe, fit_link, measure
from funcshard.estimate.machine.timing import KINDS, update_time

HERE = Source("a test")
TINY = Reference(width=16, heads=2, layers=1, batch=2, length=8, vocabulary=11)


@pytest.mark.nightly
def test_it_measures_in_processes_and_writes_a_file_that_loads(tmp_path, capsys):
    path = tmp_path / "here.json"
    hardware = calibrate(path, sizes=(1 << 10, 1 << 18), reference=TINY)
    assert load_hardware(path) == hardware
    assert hardware.name == "cpu-2x-shm"
    assert capsys.readouterr().err == f"Measuring 2 ranks over shared memory …\nWrote {path}\n"
    for kind in KINDS:
        assert collective_time(hardware, kind, 1 << 20, 2).source == "calibrated"


@pytest.mark.slow
def test_every_figure_is_measured_and_names_the_command_and_the_day():
    # Ranks that are threads of this process, which start at once.
    figures = fs.simulate(lambda mesh: measure(mesh, (1 << 10, 1 << 16), TINY, rounds=1), world_size=2)
    measured = _describe(figures, 2, shared_memory=True)
    data = json.loads(measured.to_json())
    efficiencies = ("flops_efficiency", "memory_efficiency", "optimizer_efficiency")
    figures = [data[name] for name in ("memory_bandwidth", "kernel_overhead", *efficiencies)]
    for figure in (*data["node"], *data["flops"].values(), *figures):
        assert figure["source"].startswith("measured by python -m funcshard calibrate on ")
        assert figure["source"].count("-") >= 3  # the day
    for kind in KINDS:
        found = collective_time(measured, kind, 1 << 20, 2)
        assert 1e-6 < found.seconds < 10  # a system call takes 1e-6 s or so
        assert found.source == "calibrated"
        assert collective_time(measured, kind, 1 << 20, 4).source == "extrapolated"
    for dtype in ("float32", "float64", "bfloat16"):
        seconds = 10**9 / measured.flops[dtype]  # without the efficiency, which is low in a tiny step
        assert 1e-4 < seconds < 60  # between 10 TFLOP/s and 17 MFLOP/s
        assert compute_time(measured, 10**9, 0, dtype).source == "calibrated"
    assert all(0 < getattr(measured, name) <= 1 for name in efficiencies)


def test_efficiencies_come_from_the_step():
    """Figures of one rank: the step computes at 3 of 4 FLOP/s, and moves 2 of 8 and 6 of 8 bytes a second."""
    figures = {
        "collectives": {(kind, size): [2e-3 * size, 1e-3 * size] for kind in KINDS for size in (1, 2)},
        "flops": {"float32": 4.0}, "memory_bandwidth": 8.0, "copy": 1.0, "kernel_overhead": 0.0, "step_flops": 3.0,
        "step_bandwidth": 2.0, "update": 6.0,
    }  # fmt: skip
    found = _describe([figures, figures], 2, shared_memory=True)
    assert (found.flops_efficiency, found.memory_efficiency, found.optimizer_efficiency) == (0.75, 0.25, 0.75)
    assert compute_time(found, 30, 0, "float32").seconds == 10.0
    assert compute_time(found, 0, 30, "float32").seconds == 15.0
    assert update_time(found, 30).seconds == 5.0
    assert (found.offload.size, found.offload.bandwidth) == (1, 1.0)  # each rank has its copies to itself
    fast = figures | {"step_flops": 5.0, "step_bandwidth": 9.0, "update": 9.0}  # noise: a peak was measured too low
    found = _describe([fast, fast], 2, shared_memory=True)
    assert (found.flops_efficiency, found.memory_efficiency, found.optimizer_efficiency) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("times", "latency", "bandwidth"),
    [
        ({1000: 3e-6, 2000: 4e-6, 5000: 7e-6}, 2e-6, 1e9),
        ({1000: 1e-6, 2000: 2e-6}, 0.0, 1e9),
        ({1000: 1e-7, 2000: 2e-6}, 0.0, None),  # a straight line would start below zero
        ({1000: 3e-6, 2000: 2e-6}, None, 1e9),  # noise: the larger buffer was faster
    ],
    ids=["a line", "no latency", "a negative latency", "a negative slope"],
)
def test_a_line_is_fitted(times, latency, bandwidth):
    link = fit_link("all_gather", 2, times, HERE)
    assert (link.kind, link.size, link.source) == ("all_gather", 2, HERE)
    assert link.latency >= 0
    if latency is not None:
        assert link.latency == pytest.approx(latency, rel=1e-6, abs=1e-12)
    if bandwidth is not None:
        assert link.bandwidth == pytest.approx(bandwidth, rel=1e-6)


def test_small_and_large_buffers_count_alike():
    times = {10**3: 1.1e-3, 10**9: 1.0}  # 1 ms and 1 s: both are met
    link = fit_link("all_gather", 2, times, HERE)
    for nbytes, seconds in times.items():
        assert link.latency + nbytes / link.bandwidth == pytest.approx(seconds, rel=1e-6)


def test_a_link_needs_two_ranks():
    with pytest.raises(ValueError, match="ranks must be a whole number, at least 2; found 1: pass at least 2, since"):
        calibrate(ranks=1)
