"""The plan command: published decoders, and the estimate of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard.__main__ import main
from tests.demo.test_main import check_refused

SMALL = ["--layers", "2", "--width", "8", "--heads", "2", "--context", "16"]
ESTIMATE = ["plan", *SMALL, "--ranks", "4", "--hardware", "h100"]


def linear() -> nn.Module:
    """Return a model that takes no tokens."""
    return nn.Linear(3, 5)


def samples(batch: int, seq: int) -> tuple[torch.Tensor]:
    assert torch.empty(0).is_meta, "inputs take no memory"
    return (torch.empty(batch, seq, 3),)


def no_tuple(batch: int, seq: int) -> torch.Tensor:
    return torch.empty(batch, seq, 3)


def printed(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.slow
def test_a_published_decoder_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(["plan", "--model", "llama3-405b", "--ranks", "1024", "--json", "--precision", "bf16"], capsys)
    plan = fs.Plan.from_json(out)
    assert sum(leaf.numel for leaf in plan.leaves) == 405_853_388_800
    assert len(plan.units) == 127
    assert plan.precision == fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.slow
def test_hardware_adds_the_report_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ESTIMATE, "--batch", "3", "--seq", "16", "--budget"]
    out = printed([*words, "1GiB"], capsys)
    plan, report, *tables = out.split("\n\n")
    assert plan.startswith("Plan ")
    assert "for 4 ranks, h100-8x400gbps" in report
    assert "48 a rank and step" in report  # tokens
    assert row(report, "budget")[1:3] == ["1.0", "GiB"]
    assert tables[0].startswith("Memory at the peak")
    assert "Memory binds" not in out
    again = printed([*words, "10KB", "--remat"], capsys, 1)
    assert "Memory binds" in again
    assert row(again, "activations") != row(out, "activations")


def row(text: str, first: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [first])


@pytest.mark.slow
def test_another_plan_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    plan = ["plan", *SMALL, "--ranks", "4", "--json"]
    other.write_text(printed([*plan, "--strategy", "no_shard", "--precision", "bf16"], capsys))
    out = printed([*ESTIMATE, "--compare", str(other)], capsys)
    assert "  - all units: strategy is full_shard instead of no_shard" in out
    assert "  - all units: param_dtype is None instead of torch.bfloat16" in out


def test_a_model_of_ones_own_takes_inputs_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--hardware", "h100", "--model", f"{__name__}:linear", "--inputs", f"{__name__}:samples"]
    out = printed([*argv, "--batch", "5", "--seq", "7"], capsys)
    assert row(out, "inputs")[1:3] == [str(5 * 7 * 3 * 4), "B"]


def test_a_function_of_a_file_is_planned_as_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", f"{__file__}:linear", "--inputs", f"{__file__}:samples", "--gpus", "4", "--batch", "5", "--seq", "7"]
    assert json.loads(printed([*argv, "--json"], capsys))["samples_per_second"] > 0
    assert "Linear, 20 parameters, on 4 × h100-8x400gbps. It fits" in printed(argv, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "code", "first"), [("1MB", 0, "Best of "), ("10KB", 1, "None of ")], ids=["it fits", "nothing fits"]
)
def test_the_best_plan_is_found_or_why_there_is_none(budget: str, code: int, first: str, capsys) -> None:
    out = printed([*ESTIMATE, "--auto", "--budget", budget], capsys, code)
    assert out.startswith(first)
    assert ("\nReport of plan " in out) == (code == 0)


@pytest.mark.slow
def test_the_page_has_the_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    printed([*ESTIMATE, "--html", str(page)], capsys)
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert text.count("<table") == 4
    assert text.count("data:image/png") == 3


LINEAR = f"--hardware h100 --model {__name__}:linear"
BAD = {
    "no name": ("--model llama9", "found 'llama9': did you mean 'llama3-8b'?"),
    "no hardware": ("--budget 80GiB", "--budget belongs to an estimate: add --hardware"),
    "auto alone": ("--auto", "--auto belongs to an estimate: add --hardware"),
    "auto and more": ("--hardware h100 --auto --remat", "leave out --remat"),
    "unknown hardware": ("--hardware h1000", "found 'h1000': did you mean 'h100'?"),
    "too many ranks": ("--ranks 100000000", "--ranks/--gpus: must be at most 1,000,000; found '100000000'"),
    "no description": ("--hardware linear.json", "have the form of those that come with funcshard"),
    "description of bytes": ("--hardware bytes.json", "bytes.json: 'utf-8' codec can't decode"),
    "description of text": (f"--hardware {__file__}", "it is no JSON: "),
    "budget": ("--hardware h100 --budget much", "budget must be a number of bytes, or text such as '500MB'"),
    "no plan": (f"--hardware h100 --compare {__file__}", "which holds no plan ("),
    "no file": ("--hardware h100 --compare no/such.json", "which cannot be read (No such file or directory)"),
    "a plan of another model": ("--hardware h100 --compare linear.json", "linear.json: 'norm.bias' is missing there and "),
    "too long": ("--model mpt-125m --hardware h100 --seq 4096", "build it with context=4096"),
    "no folder": ("--html no/such/page.html", "found no/such/page.html: make the folder first"),
    "other inputs": (f"{LINEAR} --inputs {__name__}:no_tuple", "inputs must return a tuple or a dictionary; found "),
    "a path and a plan": (f"{__file__}:linear --auto", "PATH finds the plan itself; found --auto: leave it out"),
    "a PATH's precision": ("--precision bf16-params", "bf16-params belongs to a PATH"),
    "no path": ("no/such", "there is no no/such: pass a config.json, or a folder with one"),
    "no config": (f"{__file__}", "isn't a configuration that transformers takes "),
    "no function of a file": (f"{__file__}:linea", "found 'linea': did you mean 'linear'?"),
    "no tokens": (LINEAR, "the model failed on its inputs ("),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("argv", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_code_2(argv: str, words: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bytes.json").write_bytes(b"\xff\xfe")
    Path("linear.json").write_text(fs.make_plan(dict(linear().named_parameters()), 2).to_json())
    check_refused(["plan", *argv.split()], words, capsys)
