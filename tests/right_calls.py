"""A right call of each public function: what tests change one argument of."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import funcshard as fs
from funcshard.graph import Traced
from funcshard.testing import delayed

__all__ = ["RIGHT_CALLS", "Call", "World"]

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a function, its arguments, its options

NET = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
APPLY, PARAMS, BUFFERS = fs.make_functional(NET)
META = copy.deepcopy(NET).to("meta")


def double(v: Any) -> Any:
    return {unit: {key: 2 * shard for key, shard in buffers.items()} for unit, buffers in v.items()}


class World:
    """What right calls are made of, on one rank of a mesh; what a call communicates, it alone communicates.

    Arguments:
        mesh: the ranks.
        folder: a folder for files.
    """

    def __init__(self, mesh: fs.Mesh, folder: Path) -> None:
        self.mesh, self.folder, self.x = mesh, folder, torch.ones(2, 4)
        self.plan = fs.make_plan(PARAMS, mesh, units=["0"])
        self.optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
        self.by_name = {name: leaf.detach() for name, leaf in PARAMS.items()}

    @property
    def shards(self) -> Any:
        return {u.name: {b.key: torch.ones(b.shard_numel) for b in u.buffers} for u in self.plan.unit_list}

    @functools.cached_property
    def sharded(self) -> Any:
        return fs.fully_shard(APPLY, self.plan, self.mesh)

    @functools.cached_property
    def step(self) -> Any:
        return fs.make_train_step(self.loss, self.optimizer, self.plan, self.mesh)

    @functools.cached_property
    def of_one_rank(self) -> tuple[Any, fs.Plan, fs.Mesh]:
        plan = fs.make_plan(PARAMS, 1, units=["0"])
        return fs.shard(PARAMS, plan, fs.Mesh()), plan, fs.Mesh()

    @functools.cached_property
    def moments(self) -> Any:
        shards, *rest = self.of_one_rank
        return fs.optimizer_to_state_dict(self.optimizer.init(shards), self.optimizer, *rest)

    @functools.cached_property
    def saved(self) -> Path:
        fs.save(self.folder / "saved", *self.of_one_rank)
        return self.folder / "saved"

    @functools.cached_property
    def dcp(self) -> Path:
        return fs.export_dcp(self.saved, self.folder / f"dcp-{next(NUMBERS)}")

    @functools.cached_property
    def exported(self) -> Path:
        fs.export_safetensors(self.folder / "out.safetensors", *self.of_one_rank)
        return self.folder / "out.safetensors"

    def loss(self, shards: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return self.sharded(shards, buffers, x).square().mean()

    def of_shards(self, shards: Any) -> torch.Tensor:
        return self.sharded(shards, BUFFERS, self.x).square().mean()


NUMBERS = itertools.count()  # of new folders


@functools.cache
def hugging_face() -> tuple[Any, Any, fs.Plan]:
    """Return the function, the shards and the plan of a model of Hugging Face."""
    transformers = importlib.import_module("transformers")  # imported here because it takes seconds
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=2, vocab_size=3, bos_token_id=0, eos_token_id=0)
    apply, params, _ = fs.make_functional(transformers.GPT2LMHeadModel(config))
    plan = fs.make_plan(params, 1)
    return apply, fs.shard(params, plan, fs.Mesh()), plan


@functools.cache
def profiled() -> fs.Profile:
    return fs.profile(APPLY, PARAMS, BUFFERS, torch.ones(3, 4))


def of_unit(unit: Any) -> dict[str, torch.Tensor]:
    return {leaf.path: PARAMS[leaf.path] for leaf in unit.leaves}


@functools.wraps(fs.save)
def save(*args: Any, **options: Any) -> None:
    fs.save(*args, **options).wait()


def of_device_mesh(**options: Any) -> None:
    """Call ``from_device_mesh`` with a mesh that it does not take once it has checked the options."""
    try:
        fs.Mesh.from_device_mesh(None, **options)  # type: ignore[arg-type]
    except TypeError as error:
        if "device_mesh must be a torch.distributed DeviceMesh" not in str(error):
            raise


def collective(name: str, *args: Any, **options: Any) -> Callable[[World], Call]:
    return lambda w: (getattr(fs, name), (torch.ones(w.mesh.world_size), w.mesh, *args), {"axis": "shard", **options})


def of_traced(name: str, **options: Any) -> Callable[[World], Call]:
    return lambda w: (getattr(fs.passes, name), (Traced(None, fs.Mesh()),), options)  # without recordings


RIGHT_CALLS: dict[str, Callable[[World], Call]] = {
    **{name: collective(name) for name in ("psum", "pmean", "pmax")},
    "all_gather": collective("all_gather", dim=0, tiled=False),
    "psum_scatter": collective("psum_scatter", dim=0, tiled=False),
    "all_to_all": collective("all_to_all", split_dim=0, concat_dim=0, tiled=False),
    "ppermute": collective("ppermute", [(0, 0)]),
    "axis_index": lambda w: (fs.axis_index, (w.mesh,), {"axis": "shard"}),
    "make_plan": lambda w: (fs.make_plan, (PARAMS, w.mesh), {
        "units": ["0"], "strategy": "full_shard", "local": (), "offload": False, "precision": None,
        "bucket_bytes": "auto", "reshard_after_forward": None,
    }),
    "Storage": lambda w: (fs.Storage, (torch.clone, torch.clone), {"block": 64}),
    **{name: functools.partial(lambda f, w: (f, (), {"block": 64}), getattr(fs, name)) for name in ("nf4", "int8", "fp8")},
    "make_schedule": lambda w: (fs.make_schedule, (w.plan,), {
        "forward_prefetch": True, "backward_prefetch": "pre", "limit": 1,
    }),
    "Schedule": lambda w: (fs.Schedule, (("a",), True, "pre", 1), {}),
    "Accumulation": lambda w: (fs.Accumulation, (), {"micro_batches": 2, "reduce": "each", "forwards": 1}),
    "predict_events": lambda w: (fs.predict_events, (w.plan,), {
        "accumulate": 1, "transform": None,
    }),
    "wrap.by_size": lambda w: (fs.wrap.by_size, (8,), {}),
    "make_functional": lambda w: (fs.make_functional, (NET,), {"mutable": False}),
    "Functional.train": lambda w: (APPLY.train, (True,), {}),
    "shard": lambda w: (fs.shard, (PARAMS, w.plan, w.mesh), {"src": None, "check": True}),
    "gather": lambda w: (fs.gather, (w.shards, w.plan, w.mesh), {}),
    "init_shards": lambda w: (fs.init_shards, (of_unit, w.plan, w.mesh), {}),
    "unshard": lambda w: (fs.unshard, (lambda leaves: 1, w.plan.units["0"], w.mesh), {"cast": None}),
    "remat": lambda w: (fs.remat, (torch.sum,), {}),
    "fully_shard": lambda w: (fs.fully_shard, (APPLY, w.plan, w.mesh), {
        "schedule": None, "cast": None, "remat": (), "compiler": None, "ignored_params": (), "methods": None,
    }),
    "value_and_grad": lambda w: (fs.value_and_grad, (w.of_shards,), {
        "has_aux": False, "mesh": w.mesh, "weighted": False, "divisor": None,
    }),
    "accumulate": lambda w: (fs.accumulate, (w.loss, 2), {
        "has_aux": False, "mesh": w.mesh, "reduce": "each", "weighted": False, "divisor": None,
    }),
    "grad": lambda w: (fs.grad, (w.of_shards,), {"has_aux": False, "mesh": w.mesh}),
    # Outputs, or an output and aux.
    "jvp": lambda w: (fs.jvp, (lambda s: (w.of_shards(s),) * 2, (w.shards,), (w.shards,)), {"has_aux": False}),
    "vjp": lambda w: (fs.vjp, (lambda s: (w.of_shards(s),) * 2, w.shards), {"has_aux": False, "mesh": w.mesh}),
    "jacobian": lambda w: (fs.jacobian, (torch.sin, torch.ones(2)), {"chunk_size": None}),
    "per_sample_grad": lambda w: (fs.per_sample_grad, (w.loss, w.plan, w.mesh), {
        "max_norm": 1.0, "noise_multiplier": 0.0, "generator": torch.Generator(), "batch_size": None, "chunk_size": None,
    }),
    "per_sample_norms": lambda w: (fs.per_sample_norms, (w.loss, w.plan, w.mesh), {"chunk_size": None}),
    "global_norm": lambda w: (fs.global_norm, (w.shards, w.plan, w.mesh), {"norm_type": 2.0}),
    "clip_by_global_norm": lambda w: (fs.clip_by_global_norm, (w.shards, w.plan, w.mesh, 1.0), {
        "norm_type": 2.0, "donate": False,
    }),
    "torch_optimizer": lambda w: (fs.torch_optimizer, (torch.optim.SGD,), {"lr": 0.1, "elementwise": None, "groups": ()}),
    "torch_schedule": lambda w: (fs.torch_schedule, (torch.optim.lr_scheduler.StepLR,), {"lr": 0.1, "step_size": 2}),
    "muon": lambda w: (fs.muon, (w.plan, w.mesh), {"lr": 0.1, "matrices": None, "adamw": None}),
    "per_matrix": lambda w: (fs.per_matrix, (lambda m: None, lambda g, s, m: (-g, s), w.plan, w.mesh), {
        "others": w.optimizer, "matrices": None,
    }),
    "assign_owners": lambda w: (fs.assign_owners, (w.plan,), {"matrices": None}),
    "make_meter": lambda w: (fs.make_meter, (w.mesh,), {"tokens": 3, "step": 0}),
    "make_train_step": lambda w: (fs.make_train_step, (w.loss, w.optimizer, w.plan, w.mesh), {
        "has_aux": False, "mutable": False, "max_norm": 1.0, "accumulate": 1, "reduce": "each", "weighted": False,
        "on_grads": None, "on_reduce_scattered": None, "divisor": None, "scaler": None, "donate": True,
    }),
    "step": lambda w: (lambda state: w.step(state, w.x), (w.step.init(w.shards, BUFFERS),), {}),
    "step.init": lambda w: (w.step.init, (w.shards, BUFFERS), {}),
    "sharded": lambda w: (lambda shards, buffers: w.sharded(shards, buffers, w.x), (w.shards, BUFFERS), {}),
    "GradScaler": lambda w: (fs.GradScaler, (), {
        "init_scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2,
    }),
    "GradScaler.unscale": lambda w: (fs.GradScaler().unscale, (w.shards, fs.GradScaler().init(w.mesh), w.mesh), {
        "donate": False,
    }),
    "copy": lambda w: (fs.copy, (w.shards,), {}),
    "to_state_dict": lambda w: (fs.to_state_dict, (w.shards, w.plan, w.mesh), {
        "buffers": None, "rank0_only": False, "offload": False, "sharded": False,
    }),
    "from_state_dict": lambda w: (fs.from_state_dict, (w.by_name, w.plan, w.mesh), {
        "src": None, "check": True, "cast": False,
    }),
    "optimizer_to_state_dict": lambda w: (
        fs.optimizer_to_state_dict, (w.optimizer.init(w.shards), w.optimizer, w.plan, w.mesh),
        {"rank0_only": False, "offload": False, "sharded": False},
    ),
    "flatten_optimizer_state_dict": lambda w: (fs.flatten_optimizer_state_dict, (w.moments,), {}),
    "optimizer_from_state_dict": lambda w: (fs.optimizer_from_state_dict, (w.moments, w.optimizer, w.plan, w.mesh), {
        "src": None, "strict": True, "steps": None,
    }),
    "attempt": lambda w: (fs.attempt, (len, (1, 2)), {"mesh": w.mesh}),
    "save": lambda w: (save, (w.folder / "again", {"shards": w.shards}, w.plan, w.mesh), {
        "wait": True, "after": None, "keep": None,
    }),
    "restore": lambda w: (fs.restore, (w.saved, w.plan, w.mesh), {"cast": False}),
    "latest": lambda w: (fs.latest, (w.folder,), {"thorough": False}),
    "replan": lambda w: (fs.replan, ([{"shards": w.of_one_rank[0]}], *w.of_one_rank[1:2] * 2), {}),
    "import_dcp": lambda w: (fs.import_dcp, (w.dcp, w.plan, w.mesh), {"cast": False}),
    "export_dcp": lambda w: (fs.export_dcp, (w.saved, w.folder / f"dcp-{next(NUMBERS)}"), {}),
    "export_safetensors": lambda w: (fs.export_safetensors, (w.folder / "new.safetensors", w.shards, w.plan, w.mesh), {
        "buffers": None, "max_shard_size": "5GB", "dtype": None,
    }),
    "iter_params": lambda w: (fs.iter_params, (w.shards, w.plan, w.mesh), {"dtype": None}),
    "import_safetensors": lambda w: (fs.import_safetensors, (w.exported, w.plan, w.mesh), {"cast": False}),
    "from_pretrained": lambda w: (fs.from_pretrained, (w.exported, w.mesh), {
        "model": META, "plan": w.plan, "mutable": False,
    }),
    "save_pretrained": lambda w: (fs.save_pretrained, (w.folder / "x", *hugging_face(), w.mesh), {"max_shard_size": "5GB"}),
    "with_collectives": lambda w: (fs.with_collectives, (w.mesh, "shard"), {"all_gather": None}),
    "stack": lambda w: (fs.stack, ({"a": [{"w": w.x}, {"w": w.x}]}, "a"), {}),
    "Plan.from_json": lambda w: (fs.Plan.from_json, (w.plan.to_json(),), {}),
    "MixedPrecision": lambda w: (fs.MixedPrecision, (), {
        "param_dtype": None, "reduce_dtype": None, "output_dtype": None, "keep_low_precision_grads": False,
        "cast_forward_inputs": True, "cast_root_forward_inputs": True, "full_precision_in_eval": False,
        "divide_before_reduce": False,
    }),
    "Mesh": lambda w: (fs.Mesh, (), {"groups": {}, "device": "cpu"}),
    "Mesh.reshaped": lambda w: (w.mesh.reshaped, ({"shard": w.mesh.world_size},), {}),
    "Mesh.from_device_mesh": lambda w: (of_device_mesh, (), {"patience": 1.0, "give_up": 1.0, "shared_memory": True}),
    "simulate": lambda w: (fs.simulate, (lambda mesh: mesh.rank, 1), {}),
    "init_mesh": lambda w: (fs.init_mesh, (), {
        "shape": None, "device": "cpu", "timeout": 5.0, "patience": 1.0, "give_up": 9.0, "shared_memory": True,
    }),
    "delayed": lambda w: (delayed, (w.mesh, "all_gather", 0.1), {}),
    "linalg.cg": lambda w: (fs.linalg.cg, (double, w.shards, w.plan, w.mesh), {"rtol": 1e-5, "atol": 0.0, "maxiter": 1}),
    "linalg.power_iteration": lambda w: (fs.linalg.power_iteration, (double, w.shards, w.plan, w.mesh), {
        "tol": 1e-3, "maxiter": 1,
    }),
    "linalg.eigsh": lambda w: (fs.linalg.eigsh, (double, w.shards, w.plan, w.mesh), {
        "k": 2, "which": "LM", "ncv": None, "maxiter": 1, "tol": 0.0,
    }),
    "linalg.lanczos_quadrature": lambda w: (fs.linalg.lanczos_quadrature, (double, w.shards, w.plan, w.mesh), {
        "generator": torch.Generator(), "ncv": 2, "num_repeats": 1, "reorthogonalize": True,
    }),
    "linalg.hutchinson_trace": lambda w: (fs.linalg.hutchinson_trace, (double, w.shards, w.plan, w.mesh), {
        "generator": torch.Generator(), "num_matvecs": 1, "distribution": "normal",
    }),
    "linalg.hutchinson_diag": lambda w: (fs.linalg.hutchinson_diag, (double, w.shards, w.plan, w.mesh), {
        "generator": torch.Generator(), "num_matvecs": 1, "distribution": "normal",
    }),
    "profile": lambda w: (fs.profile, (APPLY, PARAMS, BUFFERS, torch.ones(3, 4)), {"fold": True}),
    "estimate": lambda w: (fs.estimate, (profiled(), fs.make_plan(PARAMS, w.mesh.world_size, units=["0"])), {
        "remat": (), "accumulate": 1,
        "budget": None,
    }),
    "auto_plan": lambda w: (fs.auto_plan, (profiled(),), {"ranks": 2, "budget": None}),
    "Training": lambda w: (fs.Training, (), {"dpo": False}),
    "plan_run": lambda w: (fs.plan_run, (torch.nn.Linear(4, 4),), {
        "gpus": 2, "batch": 1, "task": fs.Training(inputs=lambda batch, seq: (torch.empty(batch, 4),)),
    }),
    "passes.keep_gathered": of_traced("keep_gathered", budget="1GB"),
    "passes.gather_earlier": of_traced("gather_earlier", budget=None, by=1),
    "passes.wait_later": of_traced("wait_later", budget=None),
}  # fmt: skip
