"""The race runs to its end and counts right; how fast anybody is, no test says."""

import json
import sys

import pytest
import torch

import funcshard as fs
from benchmarks import collectives, cuda, results, step, traffic
from benchmarks.jaxed import Jax, has_jax
from benchmarks.shapes import SHAPES
from benchmarks.turns import Ranks

TINY = SHAPES["tiny"]


def test_race_runs_end_to_end(tmp_path, capfd):
    args = ["--ranks", "2", "--rounds", "2", "--shapes", "tiny", "--peers", "none,ddp,fsdp2,full_shard"]
    found = step.main([*args, "--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")])
    assert json.loads((tmp_path / "out.json").read_text()) == found
    (race,) = found["races"]
    assert (race["shape"], race["ranks"], race["numel"]) == ("tiny", 2, 1880)
    assert {peer: len(times) for peer, times in race["seconds"].items()} == dict.fromkeys(
        ("none", "ddp", "fsdp2", "full_shard"), 2
    )
    assert all(time > 0 for times in race["seconds"].values() for time in times)
    assert race["losses"]["full_shard"] == pytest.approx(race["losses"]["ddp"], rel=1e-5)
    assert race["traffic"]["full_shard"][1] == {
        "unit": "blocks.0",
        "calls": 3,
        "sent": 3 * 872 * 4 // 2,
        "bound": 3 * 872 * 4 // 2,
    }
    assert set(found["host"]) == {"none", "ddp", "fsdp2", "full_shard"}
    page = (tmp_path / "out.md").read_text()
    assert "    python -m benchmarks.step --ranks 2 --rounds 2 --shapes tiny" in page
    assert "| peer | ms a step (quartiles) | ÷ DDP | ÷ FSDP2 | peak MiB a process | ÷ FSDP2 |" in page
    assert "funcshard full_shard" in capfd.readouterr().out


def test_collectives_are_measured_both_ways():
    gathered, reduced = collectives.tables(2, 2, (1 << 10, 1 << 17))
    for table, kind in ((gathered, "all_gather"), (reduced, "reduce_scatter")):
        assert table["title"].startswith(f"{kind}: ms of processor time a rank; 2 ranks")
        assert table["header"][1:-1] == list(collectives.WAYS)
        assert [row[0] for row in table["rows"]] == ["1 KiB", "128 KiB"]
        assert all(float(cell) > 0 for row in table["rows"] for cell in row[1:-1])


def test_memory_is_what_the_peer_holds():
    with Ranks(1) as world:
        (small,) = world.call("peak", "none", "tiny")
    with Ranks(1) as world:
        (large,) = world.call("peak", "none", "demo")
    if small is None:
        pytest.skip("this system does not say how much memory a process has at its peak")
    numel = sum(p.numel() for p in SHAPES["demo"].module().parameters())
    assert small < 2**23
    assert 16 * numel < large < 40 * numel  # parameters, gradients, two moments, and activations


def test_a_rank_that_fails_says_why():
    with Ranks(1) as world, pytest.raises(RuntimeError, match=r"(?s)rank 0 failed in make.*KeyError: 'nobody'"):
        world.call("make", "nobody", "tiny")


def test_jax_computes_the_same():
    if not has_jax(sys.executable):
        pytest.skip("JAX is not installed")
    run = TINY.module()
    with Jax(TINY, 2) as process:
        _, losses = process.steps(1)
    with torch.no_grad():
        expected = sum(TINY.loss(run(x), y).item() for x, y in (TINY.batches(rank)[0] for rank in range(2))) / 2
    assert losses == pytest.approx([expected], rel=1e-5)


def test_quartiles_and_ratios():
    assert results.spread([5.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, 2.0, 4.0)
    assert results.spread([2.0]) == (2.0, 2.0, 2.0)
    # the second round was disturbed, for both alike: the ratio within a round does not see it
    assert results.ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == (0.5, 0.5, 0.5)
    assert results.ratio([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]) == (1.0, 0.75, 1.25)


def test_table_of_a_race():
    seconds = {"ddp": [0.2, 0.2], "fsdp2": [0.4, 0.4], "full_shard": [0.1, 0.1]}
    header, rows = results.race_table(seconds, {"ddp": 4 << 20, "fsdp2": 2 << 20, "full_shard": 1 << 20})
    assert header == ["peer", "ms a step (quartiles)", "÷ DDP", "÷ FSDP2", "peak MiB a process", "÷ FSDP2"]
    assert rows[0] == ["DDP", "200.0 (200.0–200.0)", "", "0.50 (0.50–0.50)", "4", "2.00"]
    assert rows[2] == ["funcshard full_shard", "100.0 (100.0–100.0)", "0.50 (0.50–0.50)", "0.25 (0.25–0.25)", "1", "0.50"]
    assert all(len(row) == len(header) for row in rows)
    assert results.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


@pytest.mark.parametrize(
    ("losses", "complaint"),
    [
        pytest.param({"ddp": [1.0, 0.9], "full_shard": [1.0, 0.9]}, None, id="equal"),
        pytest.param({"none": [1.0, 0.5], "ddp": [1.0, 0.9]}, None, id="no communication: only the first"),
        pytest.param({"ddp": [1.0, 0.9], "jax": [1.0, 0.9005]}, None, id="rounding of many steps"),
        pytest.param({"ddp": [1.0], "jax": [1.001]}, "JAX.* something else than DDP: in step 0", id="first step"),
        pytest.param({"none": [1.1], "ddp": [1.0]}, "no communication computes something else", id="other start"),
        pytest.param({"ddp": [1.0, 0.9], "fsdp2": [1.0, 0.91]}, "in step 1 its loss is 0.91, not 0.9", id="later step"),
        pytest.param({"ddp": [1.0], "fsdp2": [float("nan")]}, "its loss is nan", id="nan"),
        pytest.param({"ddp": [1.0, 0.9], "fsdp2": [1.0]}, "FSDP2 took 1 steps, DDP 2", id="fewer steps"),
    ],
)
def test_nobody_wins_by_computing_something_else(losses, complaint):
    if complaint is None:
        results.check_losses(losses)
    else:
        with pytest.raises(ValueError, match=complaint):
            results.check_losses(losses)


def test_traffic_is_held_to_the_bound():
    plan = fs.make_plan({"a": torch.zeros(6), "b": torch.zeros(5)}, 2, units=["b"])
    events = fs.predict_events(plan)
    # the root is gathered once; b, padded to 6, twice
    assert traffic.rows(plan, events) == [("", 2, 2 * 6 * 4 // 2, 2 * 6 * 4 // 2), ("b", 3, 3 * 6 * 4 // 2, 3 * 6 * 4 // 2)]
    with pytest.raises(ValueError, match="unit 'b' sent 48 bytes a rank, which is more than its bound of 36"):
        traffic.rows(plan, [*events, events[1]])


def test_tables_go_to_their_place_in_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    step._put(page, "new\n")
    assert page.read_text() == "# Title\n<!-- results -->\nnew\n\n<!-- end of results -->\nafter\n"
    page.write_text("something else")
    step._put(page, "new\n")
    assert page.read_text() == "new\n"


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--shapes", "huge", "--shapes: found 'huge'; known are demo"),
        ("--peers", "me", "--peers: found 'me'; known are none"),
    ],
)
def test_unknown_names_are_told(option, value, complaint):
    with pytest.raises(SystemExit, match=complaint):
        step.main([option, value])


def test_a_race_that_would_swap_is_refused():
    with pytest.raises(SystemExit, match=r"needs about .* GiB, .* are free; race fewer peers"):
        step._check_memory(10**12, 2, ["ddp"], "giant")


def test_without_a_gpu_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.tables()[0]["rows"] == [["all", "not measured: no CUDA device"]]
