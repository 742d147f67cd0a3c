"""Measure the memory of steps of the real library, to compare ``estimate`` with.

``python -m benchmarks.memory_truth --json FILE`` measures all cases: the strategies, precisions, ways
to recompute and offloading of four small models, and options of steps.

Each case runs two steps as one rank of a job whose other ranks do not exist (``fake_ranks``), and
counts the storages that are alive (``storages``). The first step makes the optimizer's state, and
learns the order of the units; every later step is like the second.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import funcshard as fs
from benchmarks.fake_ranks import fake_mesh
from benchmarks.memory_models import MODELS, Model
from benchmarks.show import progress, show
from benchmarks.storages import Storages
from funcshard._utils.torch_private import is_fake

__all__ = [
    "CASES",
    "Case",
    "Measured",
    "STRATEGIES",
    "Setup",
    "main",
    "make_step",
    "measure",
    "prepare",
]

STRATEGIES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "full_shard": ({"shard": 4}, {}),
    "shard_grad_op": ({"shard": 4}, {"strategy": "shard_grad_op"}),
    "no_shard": ({"shard": 4}, {"strategy": "no_shard"}),
    "hybrid": ({"replicate": 2, "shard": 2}, {}),
    "slices": ({"shard": 4}, {"reshard_after_forward": 2}),
}
REMATS = ("none", "remat", "checkpoint")


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of a step.

    Attributes:
        model: name of the model, of ``MODELS``.
        strategy: of ``STRATEGIES``, which names a mesh and options of the plan.
        mixed: whether units compute in bfloat16, and reduce in float32.
        remat: ``"remat"`` to recompute all blocks by ``fully_shard(remat=...)``, ``"checkpoint"`` by
            ``torch.utils.checkpoint`` in the model.
        offload: whether shards live on the CPU, and the rest on the meta device.
        device: type of the mesh's device: ``"cpu"``, or ``"meta"`` for an accelerator.
        samples: number of samples in the batch.
        plan: further options of ``make_plan``.
        schedule: options of ``make_schedule``, over the order in which the model calls its units;
            ``None`` if the first step is to learn the order.
        step: options of ``make_train_step``.
        optimizer: name of the class in ``torch.optim``, and its options.
    """

    model: str
    strategy: str = "full_shard"
    mixed: bool = False
    remat: str = "none"
    offload: bool = False
    device: str = "cpu"
    samples: int = 4
    plan: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] | None = None
    step: Mapping[str, Any] = field(default_factory=dict)
    optimizer: tuple[str, Mapping[str, Any]] = ("AdamW", {})

    @property
    def name(self) -> str:
        """The options that differ from the usual ones."""
        parts = [self.model, self.strategy, *["bf16"] * self.mixed, *[self.remat] * (self.remat != "none")]
        parts += [*["offload"] * self.offload, *["meta"] * (self.device == "meta" and not self.offload)]
        options = {**self.plan, **(self.schedule or {}), **self.step, **self.optimizer[1]}
        parts += [f"{key}={value}" for key, value in options.items()] + [self.optimizer[0]] * (self.optimizer[0] != "AdamW")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a case gives to the library, and to ``estimate``.

    Attributes:
        case: the case.
        model: the model.
        mesh: the mesh.
        apply, params, buffers: the results of ``make_functional``.
        plan: the plan.
        schedule: the schedule; ``None`` if the first step learns it.
        remat: names of the units that ``fully_shard`` recomputes.
        optimizer: the optimizer.
        batch: inputs and targets.
    """

    case: Case
    model: Model
    mesh: fs.Mesh
    apply: Any
    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    plan: fs.Plan
    schedule: fs.Schedule | None
    remat: tuple[str, ...]
    optimizer: Any
    batch: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Measured:
    """The memory of a case, in bytes on the mesh's device; shards of offloaded units are elsewhere.

    Attributes:
        first: the peak of the first step.
        peak: the peak of the second step.
        between: memory between steps, batch included.
        what: the operation that reached ``peak``.
        by_category: the composition of ``peak``.
        host: the peak on the CPU in the second step, if shards are offloaded.
    """

    first: int
    peak: int
    between: int
    what: str
    by_category: dict[str, int]
    host: int | None = None


def _cases() -> dict[str, Case]:
    cases = [
        Case(model, strategy, mixed, remat, offload, "meta" if offload else "cpu", 8 if model == "convnet" else 4)
        for model in MODELS
        for strategy in STRATEGIES
        for mixed in (False, True)
        for remat in REMATS
        for offload in (False, True)
    ]
    ahead: list[Mapping[str, Any]] = [
        {"limit": 2}, {"backward_prefetch": "post"}, {"backward_prefetch": None, "forward_prefetch": False},
    ]  # fmt: skip
    cases += [Case("gpt", schedule=schedule) for schedule in ahead]
    cases += [Case("gpt", mixed=mixed, device="meta") for mixed in (False, True)]
    plans: list[Mapping[str, Any]] = [
        {"bucket_bytes": 1 << 19}, {"reshard_after_forward": False}, {"reshard_after_forward": True},
    ]  # fmt: skip
    cases += [Case("gpt", mixed=mixed, plan=plan) for plan in plans for mixed in (False, True)]
    steps: list[tuple[str, Mapping[str, Any]]] = [
        ("full_shard", {"max_norm": 1.0}), ("no_shard", {"max_norm": 1.0}), ("no_shard", {"donate": False}),
        *[(strategy, {"accumulate": 2, "reduce": reduce}) for strategy in ("full_shard", "hybrid")
          for reduce in ("each", "once", "shard_each")],
    ]  # fmt: skip
    cases += [Case("gpt", strategy, mixed=mixed, step=step) for strategy, step in steps for mixed in (False, True)]
    optimizers: list[tuple[str, Mapping[str, Any]]] = [
        ("SGD", {}), ("SGD", {"momentum": 0.9}), ("AdamW", {"fused": True}), ("AdamW", {"foreach": True}),
    ]  # fmt: skip
    cases += [Case("gpt", "no_shard", samples=1, optimizer=optimizer) for optimizer in optimizers]
    cases += [Case("gpt", "no_shard", samples=1), Case("gpt", samples=1), Case("gpt", samples=16)]
    return {case.name + ("" if case.samples in (4, 8) else f" samples={case.samples}"): case for case in cases}


CASES = _cases()


def prepare(case: Case, mesh: fs.Mesh | None = None) -> Setup:
    """Make the model, the plan and the optimizer of a case.

    Arguments:
        case: the case.
        mesh: the ranks; by default ranks that do not exist.
    """
    shape, options = STRATEGIES[case.strategy]
    mesh = fake_mesh(shape, case.device) if mesh is None else mesh
    model = MODELS[case.model]
    with torch.random.fork_rng(devices=[]), torch.device(case.device):
        torch.manual_seed(0)
        apply, params, buffers = fs.make_functional(model.build(mesh, case.remat == "checkpoint"), mutable=model.mutable)
        batch = model.batch(case.samples)
    if case.mixed:
        options = {**options, "precision": fs.MixedPrecision(torch.bfloat16, torch.float32)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that BatchNorm is a unit of its own in mixed precision
        plan = fs.make_plan(
            params, mesh, units=["blocks.*"], local=model.local, offload=case.offload, **{**options, **case.plan}
        )
    schedule = None if case.schedule is None else fs.make_schedule(plan, **case.schedule)
    # Why not all units: in mixed precision each BatchNorm is a unit inside a block.
    remat = tuple(name for name in plan.units if name.count(".") == 1) if case.remat == "remat" else ()
    cls, settings = case.optimizer
    optimizer = fs.torch_optimizer(getattr(torch.optim, cls), lr=1e-3, **settings)
    return Setup(case, model, mesh, apply, params, buffers, plan, schedule, remat, optimizer, batch)


def make_step(setup: Setup) -> tuple[Callable[..., Any], fs.TrainState]:
    """Return the step of a case, and the state before the first step; shards are constant."""
    model, plan, mesh = setup.model, setup.plan, setup.mesh
    sharded = fs.fully_shard(setup.apply, plan, mesh, schedule=setup.schedule, remat=setup.remat)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> Any:
        inputs, targets = batch
        out = sharded(shards, buffers, inputs)
        return (model.loss(out[0], targets), out[1]) if model.mutable else model.loss(out, targets)

    step = fs.make_train_step(loss_fn, setup.optimizer, plan, mesh, mutable=model.mutable, **setup.case.step)
    shards = {
        unit.name: {
            buffer.key: torch.full(
                (buffer.shard_numel,),
                0.01,
                dtype=getattr(torch, buffer.dtype),
                device="cpu" if unit.offload else mesh.device,
            )
            for buffer in unit.buffers
        }
        for unit in plan.unit_list
    }
    return step, step.init(shards, setup.buffers)


def measure(
    case: Case, mesh: fs.Mesh | None = None, *, on_change: Callable[[str, str, int, str], object] | None = None
) -> Measured:
    """Run two steps of a case, and return the memory that they take.

    Arguments:
        case: the case.
        mesh: the ranks; by default ranks that do not exist.
        on_change: see ``Storages``.
    """
    setup = prepare(case, mesh)
    step, state = make_step(setup)
    storages, batch, device = Storages(on_change), setup.batch, setup.mesh.device.type
    del setup
    for category, tensors in {"shards": state.shards, "buffers": state.buffers, "inputs": batch}.items():
        storages.hold(category, tensors)
    peaks, between = [], 0
    with storages, _attention_of_cpu():
        for _ in range(2):
            gc.collect()
            between = storages.live[device]
            storages.reset()
            gc.disable()  # so that a cycle, which would keep memory, shows in every run
            state, _ = step(state, batch)
            gc.enable()
            storages.hold("optimizer", state.opt_state)
            storages.hold("buffers", state.buffers)
            peaks.append((storages.peak(device), storages.peak("cpu")))
    (first, _), (peak, host) = peaks
    return Measured(
        first.bytes,
        peak.bytes,
        between,
        peak.what,
        dict(sorted(peak.by_category.items())),
        host.bytes if case.offload else None,
    )


@contextlib.contextmanager
def _attention_of_cpu() -> Iterator[None]:
    """Compute attention on the meta device and on fake tensors as on the CPU, not by torch's fallback."""
    usual = F.scaled_dot_product_attention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
        if not q.is_meta and not (q.is_cuda and is_fake(q)):
            return usual(q, k, v, is_causal=is_causal)
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=is_causal)[0]
        return out

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure the cases of the command line, print them, and return the measurements."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_truth", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="", help="only cases whose name begins so")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the models are small, and threads wait for each other
    names = [name for name in CASES if name.startswith(chosen.cases)]
    found = {name: measure(CASES[name]) for name in progress(names, "measuring")}
    cells = [[name, f"{m.first:,}", f"{m.peak:,}", f"{m.between:,}", m.what] for name, m in found.items()]
    show("bytes of one rank", ["case", "first step", "later steps", "between", "peak at"], cells)
    result = {name: dataclasses.asdict(each) for name, each in found.items()}
    if chosen.json:
        lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in result.items()]
        version = json.dumps(torch.__version__.partition("+")[0])
        chosen.json.write_text(f'{{"torch": {version}, "cases": {{\n' + ",\n".join(lines) + "\n}}\n")
    return result


if __name__ == "__main__":
    main()
