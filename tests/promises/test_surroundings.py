"""Default devices, default dtypes and modes of torch change nothing: our tensors name their own."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.ranks import run_ranks
from tests.states import equal

PACKAGE = Path(fs.__file__).parent
FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "empty_strided", "eye")
UNTYPED = ("empty", "zeros", "ones", "full", "rand", "randn", "eye")  # those that take the default dtype
MODELS = {"gpt.py", "decoders.py"}  # models are made on the device that the user chose

with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)  # other processes make the same parameters
    NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
APPLY, PARAMS, BUFFERS = fs.make_functional(NET)
DATA = torch.arange(12.0).reshape(4, 3) / 7


@pytest.mark.slow
def test_every_tensor_that_the_library_makes_names_its_device_and_its_dtype() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or path.name in MODELS:
                continue
            name = getattr(node.func, "attr", "")
            named = {keyword.arg for keyword in node.keywords}
            if name in FACTORIES and ast.unparse(node.func) == f"torch.{name}":
                typed = name not in UNTYPED or "dtype" in named
                if not typed or not named & {"device", "pin_memory"}:
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found


@contextlib.contextmanager
def setting(set_to: Callable[[Any], None], value: Any, before: Any) -> Any:
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


def dtype(chosen: torch.dtype) -> Any:
    return setting(torch.set_default_dtype, chosen, torch.float32)


NOTHING = contextlib.nullcontext
# Of each: what holds for the whole process, and what for one thread, and so for one simulated rank.
SURROUNDINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "with torch.device('meta')": (NOTHING, lambda: torch.device("meta")),
    "set_default_device('meta')": (NOTHING, lambda: setting(torch.set_default_device, "meta", None)),
    "set_default_dtype(float64)": (lambda: dtype(torch.float64), NOTHING),
    "set_default_dtype(bfloat16)": (lambda: dtype(torch.bfloat16), NOTHING),
    "deterministic algorithms": (lambda: setting(torch.use_deterministic_algorithms, True, False), NOTHING),
}


def life(mesh: fs.Mesh, folder: Path) -> Any:
    """Plan, shard, train, save, restore and gather; return numbers that every rank has."""
    plan = fs.make_plan(PARAMS, mesh, units=["0", "2"])
    shards = fs.shard(PARAMS, plan, mesh)
    from_rank = fs.shard(PARAMS, plan, mesh, src=0)
    f = fs.fully_shard(APPLY, plan, mesh)
    loss = lambda shards, buffers, x: f(shards, buffers, x).square().mean()  # noqa: E731
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
    step = fs.make_train_step(loss, optimizer, plan, mesh, max_norm=1.0, scaler=fs.GradScaler(), accumulate=2)
    state = step.init(shards, BUFFERS)
    for _ in range(2):
        state, metrics = step(state, DATA)
    fs.save(folder / "saved", state, plan, mesh)
    restored = fs.restore(folder / "saved", plan, mesh)
    optimizer_dict = fs.optimizer_to_state_dict(restored.opt_state, optimizer, plan, mesh)
    state_dict = fs.to_state_dict(restored.shards, plan, mesh)
    fs.export_safetensors(folder / "exported", state.shards, plan, mesh)
    imported = fs.import_safetensors(folder / "exported", plan, mesh)
    muon = fs.muon(plan, mesh, lr=0.1)
    updated, _ = muon.step(fs.copy(imported), muon.init(imported), imported)
    return [
        fs.gather(from_rank, plan, mesh), metrics, optimizer_dict["state"], state_dict, fs.gather(updated, plan, mesh),
        fs.gather(fs.from_state_dict(state_dict, plan, mesh), plan, mesh), fs.psum(DATA, mesh), fs.predict_events(plan),
    ]  # fmt: skip


def without_counters(found: list[Any]) -> list[Any]:
    """Return results without the counters of optimizers, whose dtype torch takes from the default."""
    found[2] = {name: {k: v for k, v in own.items() if k != "step"} for name, own in found[2].items()}
    return found


def run(folder: Path, in_process: Callable[[], Any], in_rank: Callable[[], Any]) -> list[Any]:
    def main(mesh: fs.Mesh) -> Any:
        with in_rank():
            return life(mesh, folder)

    with in_process():
        return fs.simulate(main, world_size=2)


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("surroundings", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_surroundings_change_no_result_on_simulated_ranks(
    surroundings: tuple[Callable[[], Any], Callable[[], Any]], tmp_path: Path
) -> None:
    plain, other = run(tmp_path / "plain", NOTHING, NOTHING), run(tmp_path / "other", *surroundings)
    for one, two in zip(plain, other, strict=True):
        assert equal(without_counters(one), without_counters(two))


def _on_meta(_mesh: fs.Mesh, folder: str) -> Any:
    with torch.device("meta"):
        return without_counters(life(fs.init_mesh(), Path(folder)))


@pytest.mark.slow
def test_real_ranks_inside_a_default_device_do_as_without(tmp_path: Path) -> None:
    plain = fs.simulate(lambda mesh: without_counters(life(mesh, tmp_path / "plain")), world_size=2)
    for one, two in zip(plain, run_ranks(_on_meta, 2, str(tmp_path / "real")), strict=True):
        assert equal(one, two)
