"""The command line: its output, and its errors for bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from funcshard.__main__ import _COMMANDS, main
from funcshard.demo.gpt import GPT


class Deep(nn.Module):
    """A user's model with nested lists: each layer of the outer list contains another list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.layers = nn.ModuleList(nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(5, 5)])}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def not_a_module() -> int:
    return 3


def broken() -> nn.Module:
    raise RuntimeError("no weights here")


number = 3


@pytest.mark.slow
def test_plan_prints_the_table_of_the_demo_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].partition(";")[0].endswith("for 2 ranks")
    assert lines[2].split() == ["unit", "buffer", "leaves", "numel", "padding", "bytes", "a", "rank", "strategy"]
    assert [line.partition("  ")[0] for line in lines[4:6]] == ["(root)", "6 × blocks.*"]
    assert f"{sum(p.numel() for p in GPT().parameters()):,}" in lines[7]
    assert not dist.is_initialized()


def test_a_reader_that_ends_early_gets_no_complaint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as closed_pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed_pipe)
        assert main(["plan", "--ranks", "2", "--layers", "1"]) == 1
    assert capfd.readouterr().err == ""


def test_a_broken_pipe_that_is_not_our_output_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_a_rank(options: object) -> int:
        raise BrokenPipeError("a rank has ended")

    monkeypatch.setitem(_COMMANDS, "plan", lose_a_rank)
    assert main(["plan", "--ranks", "2"]) == 2
    assert "a rank has ended" in capsys.readouterr().err


def test_plan_as_json_is_the_plan_that_the_library_makes(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --json --ranks 6 --replicate 2 --strategy shard_grad_op --units blocks.* --layers 2 --width 8 --heads 2"
    assert main(words.split()) == 0
    plan = fs.Plan.from_json(capsys.readouterr().out)
    assert plan.mesh_shape == (2, 3)
    assert list(plan.units) == ["", "blocks.0", "blocks.1"]
    assert {unit.strategy for unit in plan.unit_list} == {"shard_grad_op"}
    assert main([*words.split(), "--bucket-bytes", "1000000"]) == 0
    assert list(fs.Plan.from_json(capsys.readouterr().out).units) == ["", "blocks.0…blocks.1"]


UNITS = {
    "the outermost lists by default": ([], ["", "layers.0", "layers.1"]),
    "none": (["--units"], [""]),
    "given": (["--units", "first", "layers.1"], ["", "first", "layers.1"]),
}


@pytest.mark.parametrize(("units", "expected"), UNITS.values(), ids=UNITS)
def test_plan_takes_a_model_of_ones_own_on_the_meta_device(units: list[str], expected: list[str], capsys) -> None:
    assert main(["plan", "--model", f"{__name__}:Deep", "--json", *units]) == 0
    plan = fs.Plan.from_json(capsys.readouterr().out)
    assert list(plan.units) == expected
    assert sum(leaf.numel for leaf in plan.leaves) == sum(p.numel() for p in Deep().parameters())


BAD = {
    "no ranks": ("plan --ranks 0", "argument --ranks/--gpus: must be a whole number, at least 1; found '0'"),
    "a long seed": (f"train --seed {2**64}", "argument --seed: must be at most 9,223,372,036,854,775,807; found '1844"),
    "width": ("train --width 999999999999", "argument --width: must be at most 1,048,576; found '999999999999'"),
    "too many processes": ("train --ranks 1025", "argument --ranks: must be at most 1,024; found '1025'"),
    "no rate": ("train --lr -1", "argument --lr: must be a positive number; found '-1'"),
    "strategy": ("train --strategy zero", "argument --strategy: invalid choice: 'zero'"),
    "replicas": ("train --ranks 3 --replicate 2", "--replicate must divide the number of ranks; found 2 and 3"),
    "heads": ("plan --heads 5", "width must be a multiple of heads; found width 384 and 5 heads"),
    "units": ("train --units layers.*", "unit 'layers.*' matches no part of the tree"),
    "units of plan": ("plan --units blocks.0 blocks.0", "units name 'blocks.0' twice"),
    "text": ("train --text no/such/text", "--text must be a file or a folder; found none at no/such/text"),
    "out": (f"train --out {__file__}", "cannot make the folder --out"),
    "model form": ("plan --model torch", "--model must be MODULE:CALLABLE"),
    "model module": ("plan --model no_such:f", "found no_such:f: No module named 'no_such'"),
    "model name": (f"plan --model {__name__}:f", f"module '{__name__}' has no attribute 'f'"),
    "model number": (f"plan --model {__name__}:number", "must be callable; found int"),
    "model result": (f"plan --model {__name__}:not_a_module", "must return a torch.nn.Module; it returned int"),
    "no checkpoint": ("inspect nothing", "there is no checkpoint at"),
    "an empty folder": ("inspect .", "is not a complete checkpoint"),
    "one rank": ("calibrate --ranks 1", "argument --ranks: must be a whole number, at least 2; found '1'"),
    "no folder": ("calibrate no/such/folder/file.json", "path must lie in a folder that exists"),
    "model fails": (f"plan --model {__name__}:broken", "failed on the meta device: RuntimeError: no weights here"),
}  # fmt: skip


def check_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a command ends with exit code 2 and one line with these words."""
    try:
        code = main(argv)
    except SystemExit as stop:  # argparse
        code = stop.code
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "fake_tensor.py" not in line]  # torch logs errors of traces
    assert code == 2
    assert line.startswith(f"funcshard {argv[0]}: error: ")
    assert words in line
    assert out == ""


@pytest.mark.slow
@pytest.mark.parametrize(("argv", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_code_2(argv: str, words: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(argv.split(), words, capsys)


SIZES = "width layers heads context"
FLAGS = {
    "train": f"ranks replicate strategy units steps batch lr seed text out save-every resume {SIZES}",
    "plan": "ranks replicate strategy units model bucket-bytes precision json html hardware budget batch seq inputs "
    f"optimizer remat auto compare lora tensor dpo generate no-cache {SIZES}",
    "calibrate": "ranks gloo from-step plan peak",
    "inspect": "check to-dcp to-safetensors to-hf config tree",
}


@pytest.mark.parametrize(("command", "flags"), FLAGS.items(), ids=FLAGS)
def test_help_describes_every_flag(command: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    options = capsys.readouterr().out.partition("options:")[2]
    described = {part.split()[0]: part.split("\n\n")[0] for part in options.split("\n  --")[1:]}
    assert described.keys() == set(flags.split())
    for flag, text in described.items():
        assert len(text.split()) >= 4, f"--{flag} is not described: {text}"


@pytest.mark.nightly
def test_it_works_without_rich(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a line like any other\n" * 200)
    words = f"train --ranks 1 --steps 2 --layers 1 --width 8 --heads 1 --context 16 --text {text} --out {tmp_path}"
    code = f"import sys; sys.modules['rich'] = None; from funcshard.__main__ import main; sys.exit(main({words.split()!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Saved model.pt, plan.json and metrics.json in {tmp_path}" in done.stdout


README = Path(__file__).parents[2] / "README.md"


def test_the_readme_has_two_set_up_and_go_commands() -> None:
    commands = [line for line in README.read_text().splitlines() if "-m venv" in line]
    assert len(commands) == 2
    assert all('pip install -c constraints.txt -e ".[' in command for command in commands)
    assert commands[0].endswith("-m funcshard train")
    assert commands[1].endswith("-m pytest -n 2 --dist worksteal")


def test_inspect_prints_what_is_in_a_checkpoint_and_which_a_folder_holds(tmp_path: Path, capsys) -> None:
    plan, mesh = fs.make_plan({"w": torch.zeros(4, 2)}, 1), fs.Mesh()
    for step in (1, 2, 10):
        shards = fs.shard({"w": torch.zeros(4, 2)}, plan, mesh)
        fs.save(tmp_path / f"step-{step}", {"shards": shards, "step": step}, plan, mesh)
    assert main(["inspect", str(tmp_path / "step-2")]) == 0
    out = capsys.readouterr().out
    assert out == f"{fs.restore(tmp_path / 'step-2')}\n"
    assert "shards.*  shards, float32" in out
    (tmp_path / "step-3").mkdir()  # left by a save that was interrupted
    (tmp_path / "step-3" / ".lock").touch()
    assert main(["inspect", "--check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("Checkpoint")] == [
        "step-1", "step-2", "step-10",
    ]  # fmt: skip
    assert "Not complete: " in out
    (file,) = (tmp_path / "step-1").glob("*-0.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["inspect", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["inspect", "--check", str(tmp_path)]) == 1
    assert "-0.safetensors is damaged" in capsys.readouterr().out
    assert not dist.is_initialized()
