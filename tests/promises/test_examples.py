"""The programs in examples/ run, and give the numbers of one rank."""

import contextlib
import importlib.util
import io
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

import funcshard as fs
from tests.ranks import run_ranks, run_simulated

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TWO_DIMENSIONS = ROOT / "examples" / "two_dimensions.py"

# Options that make an example short, the numbers that it prints, and how far those of two ranks
# may be from those of one: printed digits, or bfloat16.
AS_ONE_RANK = {
    "distill": ("--steps 21", r"loss ([\d.]+)", 1e-3),
    "functional_params": ("--steps 11 --out OUT", r"loss ([\d.]+), gradient norm ([\d.]+)", 2e-3),
    "lora": ("--steps 3 --out OUT", r"loss ([\d.]+)", 3e-2),
    "maml": ("--steps 3", r"loss after adapting ([\d.]+)", 1e-3),
    "moe": ("--steps 11 --experts-over RANKS", r"loss ([\d.]+), (\d+)%", 1e-3),
}
# Examples whose result depends on the number of ranks: statistics of a rank's own batch, samples
# drawn on each rank. They have to learn their task.
LEARNS = {"dp_sgd": ("--steps 12", 80.0), "vision": ("--steps 50", 80.0)}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_as_a_program(mesh, name="two_dimensions", options="--steps 3"):
    """Run an example's ``main`` as on a rank of torchrun, but in this process; return its output."""
    with (
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        # peft 0.21 reads an attribute that transformers 5.23 deprecates
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        patch.setattr(sys, "argv", [f"{name}.py", *options.replace("RANKS", str(mesh.world_size)).split()])
        patch.setenv("WORLD_SIZE", str(mesh.world_size))
        load(ROOT / "examples" / f"{name}.py").main()
    return out.getvalue()


def printed(pattern, out):
    found = re.findall(pattern, out)
    return [float(number) for numbers in found for number in ([numbers] if isinstance(numbers, str) else numbers)]


def test_every_example_says_how_to_run_it_in_its_first_line_and_is_in_a_table():
    assert {path.stem for path in EXAMPLES} == {*AS_ONE_RANK, *LEARNS, "two_dimensions"}
    for path in EXAMPLES:
        first, *lines = path.read_text().splitlines()
        command = rf'"""torchrun --nproc-per-node [24] examples/{path.stem}\.py --steps \d+'
        assert re.fullmatch(command, first), f"{path.name} begins with {first!r}"
        assert len(lines) < 150, path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", AS_ONE_RANK)
def test_an_example_prints_the_same_numbers_on_two_processes_as_on_one_rank(name, tmp_path):
    options, pattern, atol = AS_ONE_RANK[name]
    options = options.replace("OUT", str(tmp_path))
    (alone,) = run_simulated(run_as_a_program, 1, name, options)
    out, other = run_ranks(run_as_a_program, 2, name, options, timeout=120)
    assert other == ""
    assert len(printed(pattern, out)) >= 2
    torch.testing.assert_close(printed(pattern, out), printed(pattern, alone), rtol=atol, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNS)
def test_an_example_learns_its_task_on_two_processes(name):
    options, least = LEARNS[name]
    out, other = run_ranks(run_as_a_program, 2, name, options, timeout=120)
    assert other == ""
    assert printed(r"([\d.]+)% of \d+ \w+ right", out)[-1] > least


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
