"""A checkpoint of any ranks becomes files of other programs, with the same bits under the names that they expect."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import funcshard as fs
from funcshard.__main__ import main
from funcshard.checkpoint import export_parameters
from funcshard.checkpoint.conversion import write_dcp
from tests.zoo.transformers_models import build

pytestmark = pytest.mark.slow  # torch.distributed.checkpoint is imported for a second

MESHES: dict[str, Any] = {"one rank": 1, "three ranks": 3, "copies": {"replicate": 2, "shard": 2}}


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    net[2].weight = net[0].weight
    return net


def train(mesh: fs.Mesh, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save the state after some steps; return what its state dicts are."""
    apply, params, _ = fs.make_functional(make_net(0))
    plan, optimizer = fs.make_plan(params, mesh, units=["3"]), fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
    sharded = fs.fully_shard(apply, plan, mesh)
    step = fs.make_train_step(lambda shards, buffers, x: sharded(shards, buffers, x).square().mean(), optimizer, plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), {})
    for _ in range(3):
        state, _ = step(state, torch.ones(2, 5))
    kept = {"train": state, "scale": torch.ones(2), "own": fs.PerRank(mesh.rank), "epoch": 1}
    fs.save(folder / "step-3", kept, plan, mesh)
    by_name = fs.optimizer_to_state_dict(state.opt_state, optimizer, plan, mesh)
    return fs.to_state_dict(state.shards, plan, mesh), by_name["state"]


WATCHED: dict[str, Callable[[Path, Path, Any], object]] = {
    "check": lambda path, to, watch: fs.restore(path).check(watch),
    "to DCP": lambda path, to, watch: write_dcp(path, to, watch),
    "to safetensors": lambda path, to, watch: export_parameters(path, to, watch=watch),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WATCHED)
def test_progress_rises_to_the_whole(what: str, tmp_path: Path) -> None:
    fs.simulate(lambda mesh: train(mesh, tmp_path), 3)
    calls: list[tuple[int, int]] = []
    WATCHED[what](tmp_path / "step-3", tmp_path / "to", lambda done, total: calls.append((done, total)))
    assert len(calls) > 3
    assert calls == sorted(set(calls))
    assert calls[-1][0] == calls[-1][1] == calls[0][1]


def load(state_dict: Mapping[str, Any], folder: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(dict(state_dict), checkpoint_id=folder, no_dist=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_module_and_its_optimizer_load_what_export_dcp_wrote(mesh: str, tmp_path: Path) -> None:
    weights, moments = fs.simulate(lambda mesh: train(mesh, tmp_path), MESHES[mesh])[0]
    folder = fs.export_dcp(tmp_path / "step-3", tmp_path / "dcp")
    module = make_net(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    model, state = get_state_dict(module, optimizer)
    scale = torch.zeros(2)
    planner = DefaultLoadPlanner(allow_partial_load=True)  # the options of an optimizer are not in a state
    load({"optim": state, "scale": scale}, folder, planner=planner)
    load({"model": model}, folder)
    set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=state)
    torch.testing.assert_close(dict(module.state_dict()), weights, rtol=0, atol=0)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(optimizer.state[parameter], moments[name], rtol=0, atol=0)
    assert scale.tolist() == [1, 1]


def test_trees_that_no_name_of_torch_fits_keep_their_names(tmp_path: Path) -> None:
    params = {"w": torch.arange(12.0).view(4, 3), "e": torch.arange(3.0)}

    def save(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(params, mesh, local={"e": "shard"})
        one = fs.shard({**params, "e": params["e"] + 10 * mesh.shard.rank}, plan, mesh)
        fs.save(tmp_path / "a", {"one": {"shards": one}, "two": {"shards": one}}, plan, mesh)

    fs.simulate(save, 2)
    loaded = {f"{tree}.shards.w": torch.zeros(4, 3) for tree in ("one", "two")}
    loaded |= {f"one.shards.e@{rank}": torch.zeros(3) for rank in range(2)}  # ranks hold different ones
    load(loaded, fs.export_dcp(tmp_path / "a", tmp_path / "b"))
    assert all(torch.equal(loaded[f"{tree}.shards.w"], params["w"]) for tree in ("one", "two"))
    assert all(torch.equal(loaded[f"one.shards.e@{rank}"], params["e"] + 10 * rank) for rank in range(2))


def test_slices_of_a_model_axis_are_joined(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)

    def save(mesh: fs.Mesh) -> None:
        plan = fs.make_plan({"w": whole[:, :3]}, mesh, local={"w": {"tensor": 1}})
        fs.save(tmp_path / "a", fs.from_state_dict({"w": whole}, plan, mesh), plan, mesh)

    fs.simulate(save, {"shard": 2, "tensor": 2})
    export_parameters(tmp_path / "a", tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], whole)


def test_export_dcp_overwrites_nothing(tmp_path: Path) -> None:
    fs.simulate(lambda mesh: train(mesh, tmp_path), 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"to must be a free path or an empty folder; found something at .*full"):
        fs.export_dcp(tmp_path / "step-3", tmp_path / "full")


def test_inspect_writes_files_of_other_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, _ = fs.simulate(lambda mesh: train(mesh, tmp_path), 2)[0]
    step, file = str(tmp_path / "step-3"), tmp_path / "w.safetensors"
    assert main(["inspect", step, "--check", "--to-dcp", str(tmp_path / "dcp"), "--to-safetensors", str(file)]) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'dcp'}\nWrote {file}\n"
    del weights["2.weight"]  # tied, and written once
    torch.testing.assert_close(load_file(file), weights, rtol=0, atol=0)
    assert main(["inspect", step, "--to-safetensors", str(file), "--tree", "optim.state.0.weight"]) == 0
    assert load_file(file).keys() == {"exp_avg", "exp_avg_sq", "step"}
    assert main(["inspect", step, "--to-safetensors", str(file), "--tree", "ema"]) == 2
    assert "holds no tree 'ema'; it holds tensors under [" in capsys.readouterr().err
    assert main(["inspect", step, "--to-hf", str(tmp_path / "hf")]) == 2
    assert "--to-hf and --config need each other" in capsys.readouterr().err


@pytest.mark.slow
def test_inspect_writes_a_folder_that_hugging_face_loads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = build("LlamaForCausalLM", "llama", {"tie_word_embeddings": True})
    model.save_pretrained(tmp_path / "config")
    _, params, _ = fs.make_functional(model)

    def save(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(params, mesh, units=["model.layers.*"])
        fs.save(tmp_path / "a", {"shards": fs.shard(params, plan, mesh), "step": 3}, plan, mesh)

    fs.simulate(save, 3)
    words = ["inspect", str(tmp_path / "a"), "--to-hf", str(tmp_path / "hf"), "--config", str(tmp_path / "config")]
    assert main(words) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.arange(6)[None]
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
