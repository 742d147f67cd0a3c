"""The race runs to its end and its tables are right; no test asserts how fast a peer is."""

import contextlib
import json
import re
import runpy
import shlex
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

from benchmarks import cuda, peers, results, step
from benchmarks.gpu_parts import PARTS
from benchmarks.jaxed import Jax, has_jax
from benchmarks.life import racing
from benchmarks.peers import Ranks
from benchmarks.shapes import SHAPES

TINY = SHAPES["tiny"]
ROOT = Path(__file__).parents[2]
ROWS = [row for file in racing.FILES for row in racing.cases_of(file)]
NAMES = {"shapes": SHAPES, "peers": peers.TITLES, "rows": ROWS, "parts": PARTS}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("server_of_forks")]  # all peers are imported


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
    raced = ["none", "ddp", "fsdp2", "full_shard", "full_shard_bucketed", "full_shard_exact"]
    args = ["--ranks", "2", "--rounds", "2", "--shapes", "tiny", "--peers", ",".join(raced)]
    files = ["--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]
    (tmp_path / "out.md").write_text("<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    found = step.main([*args, *files, "--hardware", "cpu"])
    assert json.loads((tmp_path / "out.json").read_text()) == found
    (race,) = found["races"]
    assert (race["shape"], race["ranks"], race["numel"]) == ("tiny", 2, 1880)
    assert {peer: len(times) for peer, times in race["seconds"].items()} == dict.fromkeys(raced, 2)
    assert all(time > 0 for times in race["seconds"].values() for time in times)
    assert race["losses"]["full_shard"] == pytest.approx(race["losses"]["ddp"], rel=1e-5)
    assert race["losses"]["full_shard_bucketed"] == race["losses"]["full_shard"]
    page = (tmp_path / "out.md").read_text()
    assert "    python -m benchmarks.step --ranks 2 --rounds 2 --shapes tiny" in page
    assert "| peer | ms a step (quartiles) | ÷ DDP | ÷ FSDP2 | estimated ms |" in page
    assert [bool(row[-1]) for row in race["table"][2]] == [False, False, False, True, True, False]
    assert "funcshard full_shard" in capfd.readouterr().out


@pytest.mark.slow
def test_peers_with_one_plan_race_once():
    ours = ["full_shard", "full_shard_bucketed", "full_shard_large", "shard_grad_op"]
    assert step.distinct(["ddp", *ours], "tiny", 2) == ["ddp", *ours]
    assert step.distinct(["ddp", *ours], "demo", 2) == ["ddp", "full_shard", "shard_grad_op"]  # a block has 7 MiB
    assert list(peers.planned(SHAPES["deep"], "full_shard_large", 2).units) == [""]
    compiled = ["full_shard_large", "full_shard_compiled"]
    assert step.distinct(compiled, "deep", 2) == compiled  # the same plan, but only one of them is compiled


@pytest.mark.nightly
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
