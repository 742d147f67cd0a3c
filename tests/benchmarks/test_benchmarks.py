"""The race runs to its end and its tables are right; no test asserts how fast a peer is."""

import contextlib
import json
import math
import re
import runpy
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

import funcshard as fs
from benchmarks import cuda, peers, results, step
from benchmarks.gpu_parts import PARTS
from benchmarks.jaxed import Jax, has_jax
from benchmarks.life import racing
from benchmarks.shapes import SHAPES
from benchmarks.turns import Ranks

TINY = SHAPES["tiny"]
ROOT = Path(__file__).parents[2]
ROWS = [row for file in racing.FILES for row in racing.cases_of(file)]
NAMES = {"shapes": SHAPES, "peers": peers.TITLES, "rows": ROWS, "parts": PARTS}

pytestmark = pytest.mark.usefixtures("server_of_forks")


def commands():
    """Return the command lines of pages that run a benchmark, without ``python -m``."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    pattern = re.compile(r"`python\s-m\s(benchmarks\.[^`]+)`|^ {4}.*python -m (benchmarks\.[^#\n]+)", re.MULTILINE)
    found = [a or b for page in pages for a, b in pattern.findall(page.read_text())]
    return sorted({" ".join(command.split()) for command in found} - {"benchmarks.measured"})  # it parses nothing


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", commands())
def test_a_command_of_a_page_has_only_options_that_exist(monkeypatch, command):
    parse, parsed = ArgumentParser.parse_args, []

    def stop(parser, args=None):
        parsed.append(parse(parser, args))
        raise SystemExit

    module, *args = shlex.split(command)
    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *args])
    with pytest.raises(SystemExit):
        runpy.run_module(module, run_name="__main__")
    for option, known in NAMES.items():
        assert set((getattr(parsed[0], option, "") or "").split(",")) <= {*known, ""}, option


@pytest.mark.nightly
def test_race_runs_end_to_end(tmp_path, capfd):
    args = ["--ranks", "2", "--rounds", "2", "--shapes", "tiny", "--peers", "none,ddp,fsdp2,full_shard,full_shard_bucketed"]
    files = ["--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]
    (tmp_path / "out.md").write_text("<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    found = step.main([*args, *files, "--hardware", "cpu"])
    assert json.loads((tmp_path / "out.json").read_text()) == found
    (race,) = found["races"]
    assert (race["shape"], race["ranks"], race["numel"]) == ("tiny", 2, 1880)
    assert {peer: len(times) for peer, times in race["seconds"].items()} == dict.fromkeys(
        ("none", "ddp", "fsdp2", "full_shard", "full_shard_bucketed"), 2
    )
    assert all(time > 0 for times in race["seconds"].values() for time in times)
    assert race["losses"]["full_shard"] == pytest.approx(race["losses"]["ddp"], rel=1e-5)
    assert race["losses"]["full_shard_bucketed"] == race["losses"]["full_shard"]
    page = (tmp_path / "out.md").read_text()
    assert "    python -m benchmarks.step --ranks 2 --rounds 2 --shapes tiny" in page
    assert "| peer | ms a step (quartiles) | ÷ DDP | ÷ FSDP2 | estimated ms |" in page
    assert [bool(row[-1]) for row in race["table"][2]] == [False, False, False, True, True]
    assert "funcshard full_shard" in capfd.readouterr().out


@pytest.mark.slow
def test_peers_with_one_plan_race_once():
    ours = ["full_shard", "full_shard_bucketed", "full_shard_large", "shard_grad_op"]
    assert step.distinct(["ddp", *ours], "tiny", 2) == ["ddp", *ours]
    assert step.distinct(["ddp", *ours], "demo", 2) == ["ddp", "full_shard", "shard_grad_op"]  # a block has 7 MiB
    assert list(peers.planned(SHAPES["deep"], "full_shard_large", 2).units) == [""]
    compiled = ["full_shard_large", "full_shard_compiled"]
    assert step.distinct(compiled, "deep", 2) == compiled  # the same plan, but only one of them is compiled


def test_a_peer_is_compiled(monkeypatch):
    real, asked = fs.fully_shard, []
    monkeypatch.setattr(fs, "fully_shard", lambda *args, compiler: asked.append(compiler) or real(*args))
    for peer in ("full_shard_large", "full_shard_compiled"):
        peers.made(peer, TINY)
    assert asked == [None, torch.compile]


SHARED = """
import mmap, os, signal
from benchmarks.memory import measured

size, (hear, tell) = 32 << 20, os.pipe()
with measured() as peak:
    memory = mmap.mmap(-1, size)  # shared with children
    for page in range(0, size, mmap.PAGESIZE):
        memory[page] = 1
    child = os.fork()
    if not child:
        sum(memory[page] for page in range(0, size, mmap.PAGESIZE))
        os.write(tell, b"read")
        signal.pause()
    os.read(hear, 4)
    peak.reset()
os.kill(child, signal.SIGKILL)
print(peak.bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's part of shared memory")
def test_memory_that_two_processes_share_counts_half_in_each():
    found = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, check=True)
    assert 15 << 20 < int(found.stdout) < 18 << 20


@pytest.mark.slow
def test_a_rank_that_fails_says_why():
    with Ranks(1) as world, pytest.raises(RuntimeError, match=r"(?s)rank 0 failed in make.*KeyError: 'unknown'"):
        world.call("make", "unknown", "tiny")


def test_jax_computes_the_same():
    if not has_jax(sys.executable):
        pytest.skip("JAX is not installed")
    with Jax(TINY, 2) as process:
        losses = process.steps(1)[1] + process.steps(2)[1]
    module = TINY.module()
    optimizer, expected = torch.optim.AdamW(module.parameters(), lr=1e-3), []
    for mine, yours in list(zip(TINY.batches(0), TINY.batches(1), strict=True))[:3]:
        inputs, targets = (torch.cat(both) for both in zip(mine, yours, strict=True))
        optimizer.zero_grad()
        loss = TINY.loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", peers.OURS)
@pytest.mark.parametrize(("suffix", "shared_memory"), [("", True), ("_gloo", False)])
def test_shared_memory_and_gloo_are_peers(monkeypatch, strategy, suffix, shared_memory):
    real, asked = fs.init_mesh, []
    monkeypatch.setattr(fs, "init_mesh", lambda **options: asked.append(options) or real(**options))
    run = peers.made(strategy + suffix, TINY)
    assert asked == [{"device": "cpu", "shared_memory": shared_memory}]
    inputs, targets = TINY.batches(0)[0]
    assert run((inputs, targets)).item() == pytest.approx(TINY.loss(TINY.module()(inputs), targets).item(), rel=1e-6)


def test_quartiles_and_ratios():
    assert results.spread([5.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, 2.0, 4.0)
    assert results.spread([2.0]) == (2.0, 2.0, 2.0)
    # A disturbance of the second round slowed both peers, which leaves the ratio within the round
    # unchanged.
    assert results.ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == (0.5, 0.5, 0.5)
    assert results.ratio([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]) == (1.0, 0.75, 1.25)


def test_table_of_a_race():
    seconds = {"ddp": [0.2, 0.2], "fsdp2": [0.4, 0.4], "full_shard": [0.1, 0.1]}
    header, rows = step.race_table(seconds)
    assert header == ["peer", "ms a step (quartiles)", "÷ DDP", "÷ FSDP2"]
    assert rows[0] == ["DDP", "200.0 (200.0–200.0)", "", "0.50 (0.50–0.50)"]
    assert rows[2] == ["funcshard full_shard", "100.0 (100.0–100.0)", "0.50 (0.50–0.50)", "0.25 (0.25–0.25)"]
    assert results.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


LOSSES = {  # name -> losses, and the complaint about them
    "equal": ({"ddp": [1.0, 0.9], "full_shard": [1.0, 0.9]}, None),
    "no communication: only the first": ({"none": [1.0, 0.5], "ddp": [1.0, 0.9]}, None),
    "rounding of many steps": ({"ddp": [1.0, 0.9], "jax": [1.0, 0.9005]}, None),
    "first step": ({"ddp": [1.0], "jax": [1.001]}, "JAX.* something else than DDP: in step 0"),
    "other start": ({"none": [1.1], "ddp": [1.0]}, "no communication computes something else"),
    "later step": ({"ddp": [1.0, 0.9], "fsdp2": [1.0, 0.91]}, "in step 1 its loss is 0.91, not 0.9"),
    "nan": ({"ddp": [1.0], "fsdp2": [float("nan")]}, "its loss is nan"),
    "fewer steps": ({"ddp": [1.0, 0.9], "fsdp2": [1.0]}, "FSDP2 took 1 steps, DDP 2"),
}


@pytest.mark.parametrize(("losses", "complaint"), LOSSES.values(), ids=LOSSES)
def test_a_peer_with_other_losses_is_refused(losses, complaint):
    with pytest.raises(ValueError, match=complaint) if complaint else contextlib.nullcontext():
        step.check_losses(losses)


GIB = 2**30


@pytest.mark.parametrize(
    ("ranks", "free", "left_out"),
    [
        pytest.param(2, math.inf, [], id="all"),
        pytest.param(2, 15 * GIB, ["fsdp1"], id="one too many"),
        pytest.param(4, 22 * GIB, ["fsdp1", "none"], id="whole parameters on every rank weigh most"),
    ],
)
def test_peers_that_do_not_fit_are_left_out(ranks, free, left_out):
    entered = ["none", "ddp", "fsdp1", "fsdp2", "fsdp2_kept", "full_shard", "shard_grad_op"]
    staying = [peer for peer in entered if peer not in left_out]
    assert step.fitting(101_000_000, ranks, entered, free) == (staying, left_out)


def test_a_race_that_would_swap_is_refused():
    with pytest.raises(SystemExit, match=r"DDP on 2 ranks need about .* GiB, 1.0 GiB are free; race fewer peers"):
        step.fitting(10**12, 2, ["ddp", "none"], GIB)


SPIN = "spin_kernel(long)"
SPANS = {  # name -> (begin, end, stream, kernel, launch) of each kernel, and how many gathers last and hold up for how long
    "no gather": ([(0, 10, 7, "gemm", 0)], (0, 0, 0)),
    "nothing to hold up": ([(0, 10, 20, SPIN, 0)], (1, 10, 0)),
    "under a kernel": ([(0, 10, 7, "a", 0), (2, 6, 20, SPIN, 0)], (1, 4, 0)),
    "a launched kernel waits": ([(0, 4, 7, "a", 0), (8, 9, 7, "b", 1), (2, 8, 20, SPIN, 0)], (1, 6, 4)),
    "the host was late": ([(0, 4, 7, "a", 0), (8, 9, 7, "b", 7), (2, 8, 20, SPIN, 0)], (1, 6, 1)),
    "kernels that overlap": (
        [(0, 4, 7, "a", 0), (1, 5, 8, "b", 0), (8, 9, 7, "c", 0), (0, 8, 20, SPIN, 0)], (1, 8, 3)
    ),
    "two gathers": ([(0, 4, 7, "a", 0), (6, 7, 7, "b", 0), (0, 4, 20, SPIN, 0), (2, 6, 21, SPIN, 0)], (2, 8, 2)),
}  # fmt: skip


@pytest.mark.parametrize(("spans", "expected"), SPANS.values(), ids=SPANS)
def test_a_gather_holds_up_kernels_that_are_launched(spans, expected):
    assert cuda.held_up(cuda.Kernel(*span) for span in spans) == expected


def test_kernels_of_a_chrome_trace():
    event = lambda cat, name, ts, dur, **args: {  # noqa: E731
        "ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args
    }  # fmt: skip
    events = [
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 5.0},
        event("cpu_op", "aten::mm", 1.0, 9.0),
        event("cuda_runtime", "cudaLaunchKernel", 1.5, 1.0, correlation=3),
        event("kernel", "gemm", 5.0, 2.5, stream=7, correlation=3),
    ]
    assert cuda.kernels({"traceEvents": events}) == [cuda.Kernel(5.0, 7.5, 7, "gemm", 1.5)]


def test_steps_with_a_rank_that_does_not_exist_are_traced(tmp_path):
    with cuda.pretended("cpu", 1e-3) as mesh:
        train_step, state = peers.ours(TINY, "full_shard", mesh)

        def run():
            nonlocal state
            state, _ = train_step(state, TINY.batches(0)[0])

        found = cuda.traced(run, tmp_path / "trace.json", "cpu", steps=1, warm=1)
    assert found == []  # the CPU runs no kernels
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"aten::addmm", "c10d::_allgather_base_"} <= names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gather_is_hidden_under_compute(tmp_path):
    seconds = 1e-3
    with cuda.pretended("cuda", seconds) as mesh:
        shard = torch.ones(8, device="cuda")
        big = torch.ones(4096, 4096, device="cuda")

        def run():
            work = mesh.shard.all_gather(torch.empty(16, device="cuda"), shard)
            for _ in range(20):
                big @ big
            work.wait()

        number, slept, held = cuda.held_up(cuda.traced(run, tmp_path / "trace.json", "cuda", steps=2))
    assert number == 2
    assert slept == pytest.approx(2e6 * seconds, rel=0.5)
    assert held < 0.5 * slept
