"""The training script of a planned run, as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from funcshard.checkpoint import is_hugging_face
from funcshard.estimate import Report
from funcshard.plan import Plan
from funcshard.planning.planned_model import PlannedModel
from funcshard.planning.task_models import SCRIPT
from funcshard.planning.tasks import Generation, Training
from funcshard.planning.tensor_parts import AXIS

_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW, lr=3e-4",
    "adamw_fused": "torch.optim.AdamW, lr=3e-4, fused=True",
    "adamw_single": "torch.optim.AdamW, lr=3e-4, foreach=False",
    "sgd": "torch.optim.SGD, lr=1e-2",
    "sgd_momentum": "torch.optim.SGD, lr=1e-2, momentum=0.9",
}
_PRECISION = "fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"


def training_script(model: PlannedModel, task: Training, report: Report) -> str:
    """Return a script whose ``main(mesh, batches)`` trains one rank with a plan.

    Arguments:
        model: the model; without a path, ``main`` takes the model too.
        task: what the run does.
        report: the estimate of the plan.
    """
    plan, path, module, lora, precision = (
        report.plan,
        model.path,
        model.module,
        task.lora,
        task.precision,
    )
    if task.dpo:
        return SCRIPT.format(units=list(model.units), remat=list(report.remat))
    copy_ranks = plan.world_size // plan.mesh_shape[0]
    plan_options, step_options, init_options, call = ["units=units"], "", "", "*batch)"
    imports, model_lines, option_lines, parameters = [], [], [], "mesh, batches, model"
    if path is not None:
        dtype_call = ".bfloat16()" if task.dtype else ""
        imports, parameters = ["import transformers"], "mesh, batches"
        model_lines = [
            f"    config = transformers.AutoConfig.from_pretrained({path!r})",
            '    with torch.device("meta"):',
            f"        model = transformers.{type(module).__name__}(config).train(){dtype_call}",
            "    model.tie_weights()",
        ]
    if plan.model_axes:
        # Note: the model's leaves become DTensors, which transformers makes.
        imports.append(
            "from transformers.distributed.tensor_parallel import apply_tensor_parallelism"
        )
        model_lines += [
            "    styles = model._expand_parallel_plan(model.tp_plan)",
            f"    apply_tensor_parallelism(model, mesh.device_mesh[{AXIS!r}], styles)",
        ]
    if is_hugging_face(module):
        init_options, call = ", reset=model._init_weights", "**batch).loss"
    values = f"shards, buffers = fs.init_module(model, plan, mesh{init_options})"
    if lora is not None:
        # Why no init_module: adapters are for weights that exist, and peft knows their own.
        imports = ["import peft", *imports]
        adapter_text = (
            f"peft.LoraConfig(r={lora['r']}, target_modules={list(lora['targets'])})"
        )
        model_lines.append(f"    peft.inject_adapter_in_model({adapter_text}, model)")
        values = "shards = fs.shard(params, plan, mesh)"
        if path is not None:
            model_lines[-1:] = ['    with torch.device("meta"):', f"    {model_lines[-1]}"]
            folder = path.removesuffix("config.json") or "."
            values = f"_, shards, buffers, _ = fs.from_pretrained({folder!r}, mesh, model=model, plan=plan)"
        if model.storage:
            plan_options.append("storage=storage")
            option_lines = [_storage_line(model.storage, task.base)]
    if plan.unit_list[0].strategy != "full_shard":
        plan_options.append(f"strategy={plan.unit_list[0].strategy!r}")
    if precision == "bf16":
        plan_options.append("precision=precision")
        option_lines.append(f"    precision = {_PRECISION}")
    if report.accumulation.micro_batches > 1:
        step_options = f", accumulate={report.accumulation.micro_batches}"
    lines = [
        f"# {plan.world_size} ranks, {copy_ranks} to a copy of the model: torchrun --nproc-per-node 8 ...",
        "import torch",
        *imports,
        "import funcshard as fs",
        "",
        f"MESH = {plan.mesh_axes}",
        "",
        "",
        f"def main({parameters}):",
        "    torch.manual_seed(0)  # new parameters, the same on every rank",
        *model_lines,
        "    apply, params, buffers = fs.make_functional(model)",
        *option_lines,
        *_unit_lines(plan, model.units),
        f"    plan = fs.make_plan(params, mesh, {', '.join(plan_options)})",
        f"    {values}",
        f"    sharded = fs.fully_shard(apply, plan, mesh, remat={_names_text(report.remat)})",
        f"    loss_fn = lambda shards, buffers, batch: sharded(shards, buffers, {call}",
        f"    optimizer = fs.torch_optimizer({_OPTIMIZERS[task.optimizer]})",
        f"    step = fs.make_train_step(loss_fn, optimizer, plan, mesh{step_options})",
        "    state = step.init(shards, buffers)",
        "    for batch in batches:  # this rank's part of each batch",
        "        state, metrics = step(state, batch)",
        "    return metrics, plan",
        "",
        "",
        "# Under torchrun: main(fs.init_mesh(MESH), batches)",
    ]
    return "\n".join(lines) + "\n"


def generation_script(model: PlannedModel, task: Generation, plan: Plan) -> str:
    """Return a script whose ``main(mesh, prompts)`` generates on one rank.

    Arguments:
        model: the model; without a path, ``main`` takes the model too.
        task: what the run does.
        plan: the plan.
    """
    # Note: the units of the trace are inside a module around the model.
    units = [name.removeprefix("model.") for name in model.units]
    plan_options, storage_lines = "units=units", []
    if model.storage:
        globs = [glob.removeprefix("model.") for glob in model.storage]
        plan_options, storage_lines = (
            f"{plan_options}, storage=storage",
            [_storage_line(globs, task.base)],
        )
    folder = (model.path or "").removesuffix("config.json") or "."
    lines = [
        f"# {plan.world_size} ranks: torchrun --nproc-per-node 8 ...",
        "import torch",
        "import transformers",
        "import funcshard as fs",
        "",
        f"MESH = {plan.mesh_axes}",
        "",
        "",
        "def main(mesh, prompts):",
        f"    config = transformers.AutoConfig.from_pretrained({folder!r})",
        '    with torch.device("meta"):',
        f"        model = transformers.{type(model.module).__name__}(config).to({task.dtype}).requires_grad_(False)",
        "    model.tie_weights()",
        "    apply, params, buffers = fs.make_functional(model)",
        *storage_lines,
        f"    units = {_names_text(units)}",
        f"    plan = fs.make_plan(params, mesh, {plan_options})",
        f"    apply, shards, buffers, _ = fs.from_pretrained({folder!r}, mesh, model=model, plan=plan)",
        '    generate = fs.fully_shard(apply.eval().method("generate"), plan, mesh)',
        "    # Ranks that gather weights from each other must generate equally many tokens.",
        "    return generate(shards, buffers, prompts, min_new_tokens=128, max_new_tokens=128)",
        "",
        "",
        "# Under torchrun: main(fs.init_mesh(MESH), prompts)",
    ]
    return "\n".join(lines) + "\n"


def _storage_line(globs: Iterable[str], base: str | None) -> str:
    return f"    storage = dict.fromkeys({list(globs)}, fs.{base}())"


def _unit_lines(plan: Plan, units: Sequence[str]) -> list[str]:
    """Return the lines that name the units, with the strategies that differ from the root's."""
    root_strategy = plan.unit_list[0].strategy
    strategy_of = {path: unit.strategy for unit in plan.unit_list for path in unit.paths}
    runs: list[tuple[str, list[str]]] = []
    for name in units:
        strategy = strategy_of.get(name, root_strategy)
        if not runs or runs[-1][0] != strategy:
            runs.append((strategy, []))
        runs[-1][1].append(name)
    if all(strategy == root_strategy for strategy, _ in runs):
        return [f"    units = {_names_text(units)}"]
    lines = ["    units = {}"]
    for strategy, names in runs:
        options: dict[str, Any] = {}
        if strategy != root_strategy:
            options["strategy"] = strategy
        lines.append(f"    units |= dict.fromkeys({_names_text(names)}, {options})")
    return lines


def _names_text(names: Sequence[str]) -> str:
    """Return a list of names as an expression, with a comprehension for a run of numbers."""
    parts: list[tuple[str, int, int, str]] = []
    for name in names:
        stem, number = name, -1  # Note: a name without a number joins no run.
        if numbered_name := re.fullmatch(r"(.*?)(\d+)", name):
            stem, number = numbered_name[1], int(numbered_name[2])
        if parts and parts[-1][0] == stem and parts[-1][2] == number and number >= 0:
            parts[-1] = (stem, parts[-1][1], number + 1, name)
        else:
            parts.append((stem, number, number + 1, name))
    texts = [
        repr(name)
        if end - start == 1
        else f'*(f"{stem}{{i}}" for i in range({start}, {end}))'
        for stem, start, end, name in parts
    ]
    return f"[{', '.join(texts)}]"
