"""The programs in examples/ run, and give the numbers of one rank."""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
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
    "actor_critic": ("--steps 2", r"loss ([\d.]+), carts are ([\d.]+)", 1e-3),
    "consistency": ("--steps 3", r"(?:loss|data) ([\d.]+)", 1e-3),
    "deq": ("--steps 1", r"loss ([\d.]+), (\d+) steps forward", 1e-3),
    "dpo": ("--steps 2", r"loss ([\d.]+), ([\d.]+)%", 2e-3),
    "dmd": ("--steps 2", r"(?:loss|data) ([\d.]+)", 1e-3),
    "distill": ("--steps 21", r"loss ([\d.]+)", 1e-3),
    "functional_params": ("--steps 11 --out OUT", r"loss ([\d.]+), gradient norm ([\d.]+)", 2e-3),
    "grpo": ("--steps 2", r"reward ([\d.]+), loss ([\d.-]+)", 2e-3),
    "hessian_spectrum": ("--steps 0 --out OUT/spectrum.svg", r"eigenvalue ([\d.]+), mean ([\d.e-]+)", 2e-3),
    "hypergradients": ("--steps 2", r"loss on other data ([\d.]+)", 1e-3),
    "influence": ("--steps 2", r"influence ([\d.]+) of", 2e-3),
    "lora": ("--steps 3 --out OUT", r"loss ([\d.]+)", 3e-2),
    "maml": ("--steps 3", r"loss after adapting ([\d.]+)", 1e-3),
    "mean_flow": ("--steps 3", r"(?:loss|data) ([\d.]+)", 1e-3),
    "moe": ("--steps 11 --experts-over RANKS", r"loss ([\d.]+), (\d+)%", 1e-3),
    "natural_gradient": ("--steps 2", r"loss ([\d.]+)", 1e-3),
    "pinn": ("--steps 3", r"(?:loss|solution) ([\d.]+)", 1e-3),
    "sam": ("--steps 3", r"(?:loss|Hessian) ([\d.]+)", 2e-3),
    "score_matching": ("--steps 3", r"(?:loss|score) ([\d.-]+)", 1e-3),
    "wgan_gp": ("--steps 2 --penalty first", r"critic ([\d.-]+)", 1e-3),
}
# Examples that are compared in float64, with an option of some, and the steps of the comparison.
IN_FLOAT64 = {
    "actor_critic": 2,
    "consistency": 3, "hessian_spectrum": 0, "influence lissa": 2, "dmd": 2, "dpo": 3, "deq": 3, "hypergradients": 2,
    "grpo": 2, "influence": 2, "natural_gradient": 2, "mean_flow": 3, "pinn": 3, "sam": 3, "score_matching": 3, "wgan_gp": 2,
}  # fmt: skip
# Examples that have to learn their task. The first two depend on the number of ranks: statistics of a
# rank's own batch, samples drawn on each rank.
LEARNS = {"dp_sgd": ("--steps 12", 80.0), "vision": ("--steps 50", 80.0), "dpo": ("--steps 11", 80.0)}
# Loops of other libraries, with the package that each needs.
OTHER_LOOPS = {"hf_trainer": "accelerate", "accelerate_loop": "accelerate", "lightning_trainer": "lightning"}
# Optimizers of one matrix: the programs end in an error unless shards have the bits of whole parameters.
MATRIX_OPTIMIZERS = ("kron", "shampoo", "soap")


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
    others = {"finetune_llama", "matrix_optimizers", "multi_lora", "preemption", "two_dimensions"}
    assert {path.stem for path in EXAMPLES} == {*AS_ONE_RANK, *LEARNS, *OTHER_LOOPS, *others}
    for path in EXAMPLES:
        first, *lines = path.read_text().splitlines()
        command = rf'"""torchrun --nproc-per-node [24] examples/{path.stem}\.py --steps \d+'
        assert re.fullmatch(command, first), f"{path.name} begins with {first!r}"
        assert len(lines) < 150, path.name


@pytest.mark.nightly(one_in=8)
@pytest.mark.parametrize("name", AS_ONE_RANK)
def test_an_example_prints_the_same_numbers_on_two_processes_as_on_one_rank(name, tmp_path):
    options, pattern, atol = AS_ONE_RANK[name]
    options = options.replace("OUT", str(tmp_path))
    (alone,) = run_simulated(run_as_a_program, 1, name, options)
    out, other = run_ranks(run_as_a_program, 2, name, options, timeout=120)
    assert other == ""
    assert len(printed(pattern, out)) >= 2
    torch.testing.assert_close(printed(pattern, out), printed(pattern, alone), rtol=atol, atol=atol)


def plain(apply, plan, mesh):
    """Return the module's function itself, of the whole parameters."""
    return lambda shards, buffers, *args, **options: apply(fs.gather(shards, plan, mesh), buffers, *args, **options)


def in_float64(mesh, name, steps):
    name, *options = name.split()
    return load(ROOT / "examples" / f"{name}.py").train(mesh, steps, *options)


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("name", IN_FLOAT64)
def test_an_example_has_the_numbers_of_its_plain_modules_in_float64(name):
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fs, "fully_shard", plain)
            alone = in_float64(fs.Mesh(), name, IN_FLOAT64[name])
        for numbers in run_simulated(in_float64, 4, name, IN_FLOAT64[name], shape={"replicate": 2, "shard": 2}):
            torch.testing.assert_close(numbers, alone, rtol=1e-10, atol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.nightly
def test_fine_tuning_resumes_with_the_next_batch_on_another_number_of_ranks_and_exports_a_model(tmp_path):
    from transformers import AutoModelForCausalLM  # seconds

    options = f"--steps 4 --save-every 2 --context 16 --lr 0.01 --out {tmp_path}"
    whole, other = run_ranks(run_as_a_program, 2, "finetune_llama", options, timeout=120)
    assert other == ""
    pattern = r"step (\d): loss ([\d.]+), gradient norm ([\d.]+)"
    losses = printed(pattern, whole)
    assert losses[0::3] == [1, 2, 3, 4]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    shutil.rmtree(tmp_path / "checkpoints" / "step-4")  # as if killed after step 3
    options = options.replace("--steps 4", "--steps 4 --batch 8")  # the same batches on one rank
    (resumed,) = run_simulated(run_as_a_program, 1, "finetune_llama", options)
    torch.testing.assert_close(printed(pattern, resumed), losses[6:], rtol=0.02, atol=0.02)  # bfloat16

    (held_out,) = printed(r"held-out text ([\d.]+)", whole)
    ids = (
        load(ROOT / "examples" / "finetune_llama.py")
        .load_text(argparse.Namespace(text=None, model=None, context=16))[1]
        .tensors[0]
    )
    ids = torch.cat([half[:4] for half in ids.chunk(2)])
    with torch.no_grad():
        logits = exported(input_ids=ids[:, :-1]).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss.item(), held_out, rtol=0.01, atol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHER_LOOPS)
def test_a_step_inside_another_librarys_loop_has_the_losses_of_its_ddp(name):
    if importlib.util.find_spec(OTHER_LOOPS[name]) is None:
        pytest.skip(f"{OTHER_LOOPS[name]} is not installed")

    def losses(*way):  # accelerate reads all that torchrun sets
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"examples/{name}.py"]
        command = [sys.executable, *torchrun, "--steps", "3", *way]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
        assert ran.returncode == 0, ran.stderr
        return printed(r"(?:step \d: loss |'loss': ')([\d.]+)", ran.stdout)

    sharded = losses()
    assert len(sharded) == 3  # rank 0 alone prints
    assert sharded == losses("--plain")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft 0.21
def test_adapters_train_at_once_as_alone_with_the_gathers_of_one_and_continue_by_themselves(tmp_path):
    example, rates = load(ROOT / "examples" / "multi_lora.py"), [3e-2, 1e-2, 3e-3]

    def alone(number):  # the plain module and optimizer
        model, losses = example.make_model(number), []
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rates[number])
        for step in range(4):
            ids = example.make_batch(number, step)
            logits = model(input_ids=ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            grads = torch.autograd.grad(loss, trained)
            for parameter, grad in zip(trained, grads, strict=True):
                parameter.grad = grad
            optimizer.step()
            losses.append(loss.item())
        return losses

    def checked(ranks, steps, count, expected):
        """Return the gathers of the base and the reductions of a step."""
        for history in run_simulated(example.train, ranks, steps, rates[:count], tmp_path):
            torch.testing.assert_close(torch.tensor([losses for losses, _ in history]), expected, rtol=1e-10, atol=1e-10)
        gathers, reductions = [[e for e in history[0][1] if e.kind == kind] for kind in ("all_gather", "reduce_scatter")]
        assert len({(e.unit, e.buffer) for e in gathers}) == len(gathers)  # once
        return [(e.unit, e.bytes) for e in gathers if "frozen" in e.buffer], [e.unit for e in reductions]

    torch.set_default_dtype(torch.float64)
    try:
        expected = torch.tensor([alone(number) for number in range(3)]).T
        of_three = checked(2, 3, 3, expected[:3])
        assert of_three == checked(4, 1, 1, expected[3:, :1])
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("name", LEARNS)
def test_an_example_learns_its_task_on_two_processes(name):
    options, least = LEARNS[name]
    out, other = run_ranks(run_as_a_program, 2, name, options, timeout=120)
    assert other == ""
    assert printed(r"([\d.]+)% of \d+ \w+ right", out)[-1] > least


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MATRIX_OPTIMIZERS)
def test_an_optimizer_of_one_matrix_has_the_bits_of_its_unsharded_self(name, ranks):
    out = run_simulated(run_as_a_program, ranks, "matrix_optimizers", f"--steps 21 --optimizer {name}")
    first, last = printed(r"loss ([\d.]+)", "".join(out))  # simulated ranks share one output
    assert last < 0.6 * first


@pytest.mark.nightly
def test_a_llama_on_four_processes_in_two_dimensions_has_the_losses_of_one_rank():
    out, *others = run_ranks(run_as_a_program, 4, timeout=150)
    assert others == [""] * 3
    assert "for 4 ranks = 2 shard × 2 tensor" in out
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+), .* KiB along shard", out, re.MULTILINE)]
    assert len(losses) == 3
    alone = load(TWO_DIMENSIONS).train(fs.Mesh(), steps=3)
    torch.testing.assert_close(losses, alone, rtol=0, atol=1e-4)  # four digits are printed
