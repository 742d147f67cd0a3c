"""The programs in examples/ run, and give the numbers of one rank."""

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import pytest
import torch

import funcshard as fs
from tests.ranks import run_ranks, run_simulated

ROOT = Path(__file__).resolve().parents[2]
TWO_DIMENSIONS = ROOT / "examples" / "two_dimensions.py"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_as_a_program(mesh):
    """Run the example's ``main`` as on a rank of torchrun, but in this process; return its output."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["two_dimensions.py", "--steps", "3"])
        patch.setenv("WORLD_SIZE", str(mesh.world_size))
        load(TWO_DIMENSIONS).main()
    return out.getvalue()


@pytest.mark.slow
def test_a_llama_on_four_processes_in_two_dimensions_has_the_losses_of_one_rank():
    out, *others = run_ranks(run_as_a_program, 4, timeout=150)
    assert others == [""] * 3
    assert "for 4 ranks = 2 shard × 2 tensor" in out
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+), .* KiB along shard", out, re.MULTILINE)]
    assert len(losses) == 3
    alone = load(TWO_DIMENSIONS).train(fs.Mesh(), steps=3)
    torch.testing.assert_close(losses, alone, rtol=0, atol=1e-4)  # four digits are printed


@pytest.mark.slow
def test_a_llama_on_simulated_ranks_trains_as_on_one_rank():
    train = load(TWO_DIMENSIONS).train
    alone = train(fs.Mesh(), 3, 8, torch.float64)
    for losses in run_simulated(train, 4, 3, 8, torch.float64, shape={"replicate": 2, "shard": 2}):
        torch.testing.assert_close(losses, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_two_dimensions_says_that_simulated_ranks_have_no_tensor_axis(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["two_dimensions.py", "--simulate", "4"])
    with pytest.raises(SystemExit):
        load(TWO_DIMENSIONS).main()
    assert "pass --tensor 1 with --simulate" in capsys.readouterr().err
