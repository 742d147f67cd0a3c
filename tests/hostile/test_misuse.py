"""Every argument of every public function is replaced by junk: an error of ours, or nothing happens."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.hostile.blame import outcome_of
from tests.hostile.campaign import Campaign

pytestmark = pytest.mark.hostile

KINDS = (ValueError, TypeError, OSError, RuntimeError)
HANG = 30.0


class Odd:
    """An object that is of no use as an argument."""


JUNK: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "zero": lambda: 0, "minus one": lambda: -1, "a big int": lambda: 2**70,
    "a float": lambda: 1.5, "nan": lambda: float("nan"), "inf": lambda: float("inf"), "a complex": lambda: 1j,
    "an empty text": lambda: "", "a text": lambda: "shard", "bytes": lambda: b"shard", "a list": list,
    "a list of texts": lambda: ["a", "b"], "a nested list": lambda: [[1], [2]], "a tuple": lambda: (1, 2), "a dict": dict,
    "a dict of numbers": lambda: {1: 2}, "a set": lambda: {1}, "a class": lambda: dict,
    "a function": lambda: lambda *a, **k: None,
    "a function that returns its input": lambda: lambda *a: a[0] if a else None, "an object": Odd,
    "a generator": lambda: (i for i in range(3)), "a module": lambda: nn.Linear(2, 2), "a tensor": lambda: torch.ones(3),
    "a scalar tensor": lambda: torch.tensor(1.0), "an int tensor": lambda: torch.ones(2, dtype=torch.int64),
    "a tensor on meta": lambda: torch.ones(3, device="meta"),
    "a dtype": lambda: torch.float32, "a device": lambda: torch.device("cpu"), "a tree": lambda: {"w": torch.ones(2)},
    "a mesh": fs.Mesh, "a path": lambda: Path("nowhere"), "a folder": lambda: tempfile.gettempdir(),
    "an exception": lambda: ValueError("no"), "the module itself": lambda: fs,
}  # fmt: skip


# --- one right call of each public function, as positional and named arguments --------------------


class World:
    """What the right calls are made of, on one rank of one mesh."""

    def __init__(self, mesh: fs.Mesh, folder: Path) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.mesh, self.folder, self.x = mesh, folder, torch.ones(2, 4)
        self.apply, self.params, self.buffers = fs.make_functional(self.net)
        self.plan = fs.make_plan(self.params, mesh, units=["0"])
        self.shards = fs.shard(self.params, self.plan, mesh)
        self.sharded = fs.fully_shard(self.apply, self.plan, mesh)
        self.optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
        self.step = fs.make_train_step(self.loss, self.optimizer, self.plan, mesh)
        self.state = self.step.init(fs.copy(self.shards), self.buffers)
        self.by_name = fs.to_state_dict(self.shards, self.plan, mesh)
        self.moments = fs.optimizer_to_state_dict(self.state.opt_state, self.optimizer, self.plan, mesh)
        fs.save(folder / "saved", {"shards": self.shards}, self.plan, mesh)
        fs.export_safetensors(folder / "out.safetensors", self.shards, self.plan, mesh)

    def loss(self, shards: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return self.sharded(shards, buffers, x).square().mean()

    def of_shards(self, shards: Any) -> torch.Tensor:
        return self.sharded(shards, self.buffers, self.x).square().mean()

    def one(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


def calls(w: World) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    unit, x = w.plan.units["0"], torch.arange(4.0)
    meshed = {
        name: (getattr(fs, name), (x, w.mesh), {"axis": "shard"})
        for name in ("psum", "pmean", "pmax", "all_gather", "psum_scatter", "all_to_all")
    }
    return meshed | {
        "ppermute": (fs.ppermute, (x, w.mesh, [(0, 0)]), {"axis": "shard"}),
        "axis_index": (fs.axis_index, (w.mesh,), {"axis": "shard"}),
        "make_plan": (fs.make_plan, (w.params, w.mesh), {
            "units": ["0"], "strategy": "full_shard", "ties": (), "local": (), "offload": False, "precision": None,
            "bucket_bytes": "auto", "reshard_after_forward": None, "reshard_after_backward": True,
        }),
        "make_schedule": (fs.make_schedule, (w.plan,), {}),
        "predict_events": (fs.predict_events, (w.plan,), {}),
        "make_functional": (fs.make_functional, (w.net,), {"mutable": False}),
        "shard": (fs.shard, (w.params, w.plan, w.mesh), {"src": None, "check": True}),
        "gather": (fs.gather, (w.shards, w.plan, w.mesh), {}),
        "init_shards": (fs.init_shards, (lambda unit: w.params, w.plan, w.mesh), {}),
        "unshard": (fs.unshard, (lambda leaves: 1, unit, w.mesh), {"cast": None}),
        "remat": (fs.remat, (w.one,), {}),
        "fully_shard": (fs.fully_shard, (w.apply, w.plan, w.mesh), {
            "schedule": None, "cast": None, "remat": (), "compiler": None, "ignored_params": (), "methods": None,
        }),
        "value_and_grad": (fs.value_and_grad, (w.of_shards,), {"has_aux": False, "mesh": w.mesh, "weighted": False}),
        "accumulate": (fs.accumulate, (w.loss, 2), {"has_aux": False, "mesh": w.mesh, "reduce": "each"}),
        "per_sample_grad": (fs.per_sample_grad, (w.loss, w.plan, w.mesh), {
            "max_norm": 1.0, "noise_multiplier": 0.0, "generator": None, "batch_size": None, "chunk_size": None,
        }),
        "global_norm": (fs.global_norm, (w.shards, w.plan, w.mesh), {"norm_type": 2.0}),
        "clip_by_global_norm": (fs.clip_by_global_norm, (w.shards, w.plan, w.mesh, 1.0), {
            "norm_type": 2.0, "donate": False,
        }),
        "torch_optimizer": (fs.torch_optimizer, (torch.optim.SGD,), {"lr": 0.1, "elementwise": None, "groups": ()}),
        "torch_schedule": (fs.torch_schedule, (torch.optim.lr_scheduler.StepLR,), {"lr": 0.1, "step_size": 2}),
        "muon": (fs.muon, (w.plan, w.mesh), {"lr": 0.1, "matrices": None, "adamw": None}),
        "assign_owners": (fs.assign_owners, (w.plan,), {"matrices": None}),
        "make_meter": (fs.make_meter, (w.mesh,), {"tokens": 3, "step": 0}),
        "make_train_step": (fs.make_train_step, (w.loss, w.optimizer, w.plan, w.mesh), {
            "has_aux": False, "mutable": False, "max_norm": 1.0, "accumulate": 1, "reduce": "each", "weighted": False,
            "on_grads": None, "on_reduce_scattered": None, "divisor": None, "scaler": None, "donate": True,
        }),
        "step": (lambda state: w.step(state, w.x), (fs.copy(w.state),), {}),
        "step.init": (w.step.init, (w.shards, w.buffers), {}),
        "sharded": (lambda shards, buffers: w.sharded(shards, buffers, w.x), (w.shards, w.buffers), {}),
        "GradScaler": (fs.GradScaler, (), {
            "init_scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2,
        }),
        "copy": (fs.copy, (w.shards,), {}),
        "to_state_dict": (fs.to_state_dict, (w.shards, w.plan, w.mesh), {
            "buffers": None, "rank0_only": False, "offload": False, "sharded": False,
        }),
        "from_state_dict": (fs.from_state_dict, (w.by_name, w.plan, w.mesh), {"src": None, "check": True, "cast": False}),
        "optimizer_to_state_dict": (fs.optimizer_to_state_dict, (w.state.opt_state, w.optimizer, w.plan, w.mesh), {}),
        "optimizer_from_state_dict": (fs.optimizer_from_state_dict, (w.moments, w.optimizer, w.plan, w.mesh), {
            "src": None, "strict": True, "steps": None, "check": True,
        }),
        "save": (fs.save, (w.folder / "again", {"shards": w.shards}, w.plan, w.mesh), {
            "wait": True, "after": None, "keep": None, "timeout": 5.0,
        }),
        "restore": (fs.restore, (w.folder / "saved", w.plan, w.mesh), {}),
        "latest": (fs.latest, (w.folder,), {"thorough": False}),
        "replan": (fs.replan, ([{"shards": w.shards}], w.plan, w.plan), {}),
        "export_safetensors": (fs.export_safetensors, (w.folder / "new.safetensors", w.shards, w.plan, w.mesh), {
            "buffers": None, "max_shard_size": "5GB", "dtype": None,
        }),
        "import_safetensors": (fs.import_safetensors, (w.folder / "out.safetensors", w.plan, w.mesh), {"cast": False}),
        "with_collectives": (fs.with_collectives, (w.mesh, "shard"), {"all_gather": None}),
        "stack": (fs.stack, ({"a": [{"w": x}, {"w": x}]}, "a"), {}),
        "Plan.from_json": (fs.Plan.from_json, (w.plan.to_json(),), {}),
        "MixedPrecision": (fs.MixedPrecision, (), {"param_dtype": None, "reduce_dtype": None, "output_dtype": None}),
        "Mesh": (fs.Mesh, (), {"groups": {}, "device": "cpu"}),
        "simulate": (fs.simulate, (lambda mesh: mesh.rank, 1), {}),
        "init_mesh": (fs.init_mesh, (), {
            "shape": None, "device": "cpu", "timeout": 5.0, "patience": 1.0, "shared_memory": True,
        }),
    }  # fmt: skip


def misuse(mesh: fs.Mesh, seed: int, folder: Path) -> str:
    """Call some public function with one or two arguments replaced; return what came of it."""
    draw, w = Random(seed), World(mesh, folder)
    all_calls = calls(w)
    name = draw.choice(sorted(all_calls))
    function, positional, named = all_calls[name]
    places: list[Any] = [*range(len(positional)), *named]
    changes = {place: draw.choice(list(JUNK)) for place in draw.sample(places, min(len(places), draw.choice([1, 1, 2])))}
    arguments = [JUNK[changes[i]]() if i in changes else value for i, value in enumerate(positional)]
    options = {key: JUNK[changes[key]]() if key in changes else value for key, value in named.items()}
    if draw.random() < 0.1:
        options["no_such_option"] = 1
        changes["no_such_option"] = "1"
    what = f"{name}({', '.join(f'{place}: {junk}' for place, junk in changes.items())})"
    if "no_such_option" in options:
        try:
            inspect.signature(function).bind(*arguments, **options)
        except TypeError:
            return "refused by Python"
    found = outcome_of(lambda: function(*arguments, **options), what, KINDS)
    return "refused" if isinstance(found, Exception) else "accepted"


def test_junk_in_any_argument_of_any_function_is_refused_in_words(campaign: Campaign, monkeypatch: Any) -> None:
    def one(draw: Random) -> dict[str, int]:
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder, monkeypatch.context() as patch:
            patch.chdir(folder)  # junk may be a relative path
            outcome = fs.simulate(lambda mesh: misuse(mesh, draw.getrandbits(32), Path(folder)), 1)[0]
            return {"calls": 1, outcome: 1}

    campaign.run(one, short=60, full=10_000, limit=HANG)
