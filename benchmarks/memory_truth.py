"""Measure the memory of steps of the real library, to compare ``estimate`` with.

``python -m benchmarks.memory_truth`` measures all cases and writes ``memory_truth.json``: the
strategies, precisions, ways to recompute and offloading of four small models, and options of steps.

Each case runs two steps as one rank of a job whose other ranks do not exist (``fake_ranks``), and
counts the storages that are alive (``storages``). The first step makes the optimizer's state, and
learns the order of the units; every later step is like the second.
"""

from __future__ import annotations

import contextlib
import gc
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs
from benchmarks.fake_ranks import fake_mesh
from benchmarks.published import LOSSES, Checkpointed
from benchmarks.results import progress
from benchmarks.storages import Storages
from funcshard._utils.torch_private import is_fake
from funcshard.demo import DecoderConfig
from funcshard.demo.decoders import Decoder
from funcshard.demo.gpt import GPT, GPTConfig

FILE = Path(__file__).with_suffix(".json")
BLOCKS, WIDTH, CONTEXT, VOCABULARY = 4, 64, 32, 256
HEADS, HIDDEN = 4, 172
EXPERTS = 8
STRATEGIES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "full_shard": ({"shard": 4}, {}),
    "shard_grad_op": ({"shard": 4}, {"strategy": "shard_grad_op"}),
    "no_shard": ({"shard": 4}, {"strategy": "no_shard"}),
    "hybrid": ({"replicate": 2, "shard": 2}, {}),
    "slices": ({"shard": 4}, {"reshard_after_forward": 2}),
}
REMATS = ("none", "remat", "checkpoint")
_RESHARD = (("reshard_after_forward", False), ("reshard_after_forward", True))
_SCHEDULES = ({"limit": 2}, {"backward_prefetch": "post"}, {"backward_prefetch": None, "forward_prefetch": False})
_OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {}), ("SGD", {"momentum": 0.9}), ("AdamW", {}), ("AdamW", {"fused": True}), ("AdamW", {"foreach": True}),
)  # fmt: skip


# --- models ---------------------------------------------------------------------------------------

# Parameters and activations take about as much memory as each other, so that an error in either one
# shows. Every model has four equal blocks, which are the units.


def tokens(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    return torch.zeros(samples, CONTEXT, dtype=torch.long), torch.zeros(samples, CONTEXT, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class Model:
    """A model to measure.

    Attributes:
        build: ``build(mesh)`` returns the module.
        batch: ``batch(samples)`` returns inputs and targets.
        loss: ``loss(output, targets)`` returns the mean over the batch.
        local: the leaves of a block that each rank keeps for itself.
        mutable: whether forward changes buffers.
    """

    build: Callable[[fs.Mesh], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = tokens
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = LOSSES["eager"]
    local: tuple[str, ...] = ()
    mutable: bool = False


class _Experts(nn.Module):
    """A mixture of experts in which each expert chooses its tokens, and lives on one rank."""

    def __init__(self, mesh: fs.Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        own = EXPERTS // mesh.world_size
        self.experts = nn.ParameterDict({
            "up": nn.Parameter(torch.randn(own, WIDTH, HIDDEN) / 8),
            "down": nn.Parameter(torch.randn(own, HIDDEN, WIDTH) / 8),
        })  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).flatten(0, 1)
        weights = self.router(y).softmax(-1)
        weight, tokens = weights.topk(2 * len(y) // EXPERTS, dim=0)  # [place, expert]
        sent = y[tokens.T]  # [expert, place, width]
        if self.mesh.world_size > 1:
            sent = fs.all_to_all(sent, self.mesh, split_dim=0, concat_dim=1, tiled=True)
        found = torch.bmm(F.gelu(torch.bmm(sent, self.experts["up"])), self.experts["down"])
        if self.mesh.world_size > 1:
            found = fs.all_to_all(found, self.mesh, split_dim=1, concat_dim=0, tiled=True)
        out = torch.zeros_like(y).index_add(0, tokens.T.flatten(), (found * weight.T.unsqueeze(-1)).flatten(0, 1))
        return x + out.view_as(x)


class _ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class _Stack(nn.Module):
    """A stem, blocks, a norm, and a head that is not tied to the stem."""

    def __init__(self, stem: nn.Module, block: Callable[[], nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(block() for _ in range(BLOCKS)), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def _moe(mesh: fs.Mesh) -> nn.Module:
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    return _Stack(nn.Embedding(VOCABULARY, WIDTH), lambda: _Experts(mesh), head)


def _convnet(mesh: fs.Mesh, width: int = 48) -> nn.Module:
    """Return a residual net with BatchNorm."""
    head = nn.Sequential(_Mean(), nn.Linear(width, 10))
    return _Stack(nn.Conv2d(3, width, 3, padding=1), lambda: _ConvBlock(width), head)


def _images(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(samples, 3, 16, 16), torch.zeros(samples, dtype=torch.long)


def _class_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float(), targets)


_GPT_SIZES = GPTConfig(width=WIDTH, layers=BLOCKS, heads=HEADS, context=CONTEXT, vocabulary=VOCABULARY)
_LLAMA_SIZES = DecoderConfig(WIDTH, BLOCKS, HEADS, VOCABULARY, HIDDEN, kv_heads=HEADS // 2, context=CONTEXT)
MODELS = {
    "gpt": Model(lambda mesh: GPT(_GPT_SIZES)),
    "llama": Model(lambda mesh: Decoder(_LLAMA_SIZES)),
    "moe": Model(_moe, local=("experts",)),
    "convnet": Model(_convnet, _images, _class_loss, mutable=True),
}


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
        plan, step: further options of ``make_plan`` and of ``make_train_step``.
        schedule: options of ``make_schedule``; ``None`` if the first step is to learn the order.
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
        return " ".join(parts + [f"samples={self.samples}"] * (self.samples not in (4, 8)))


class Setup(NamedTuple):
    """Everything that a case gives to the library, and to ``estimate``."""

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


class Measured(NamedTuple):
    """The memory of a case, in bytes on the mesh's device; shards of offloaded units are elsewhere.

    Attributes:
        first, peak: the peaks of the first and of the second step.
        between: memory between steps, batch included.
        host: the peak on the CPU in the second step, if shards are offloaded.
    """

    first: int
    peak: int
    between: int
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
    both: list[dict[str, Any]] = [{"device": "meta"}]
    both += [{"plan": {name: value}} for name, value in (("bucket_bytes", 1 << 19), *_RESHARD)]
    both += [{"step": {"max_norm": 1.0}}]
    both += [{"strategy": "no_shard", "step": step} for step in ({"max_norm": 1.0}, {"donate": False})]
    both += [
        {"strategy": strategy, "step": {"accumulate": 2, "reduce": reduce}}
        for strategy in ("full_shard", "hybrid")
        for reduce in ("each", "once", "shard_each")
    ]
    cases += [Case("gpt", mixed=mixed, **options) for options in both for mixed in (False, True)]
    cases += [Case("gpt", schedule=schedule) for schedule in _SCHEDULES]
    cases += [Case("gpt", "no_shard", samples=1, optimizer=optimizer) for optimizer in _OPTIMIZERS]
    cases += [Case("gpt", samples=samples) for samples in (1, 16)]
    return {case.name: case for case in cases}


CASES = _cases()


def prepare(case: Case, mesh: fs.Mesh | None = None) -> Setup:
    """Make the model, the plan and the optimizer of a case, by default for ranks that do not exist."""
    shape, options = STRATEGIES[case.strategy]
    mesh = fake_mesh(shape, case.device) if mesh is None else mesh
    model = MODELS[case.model]
    with torch.random.fork_rng(devices=[]), torch.device(case.device):
        torch.manual_seed(0)
        net, unit = model.build(mesh), "blocks.*"
        if case.remat == "checkpoint":  # around units
            net.blocks, unit = nn.ModuleList(Checkpointed(block) for block in net.blocks), "blocks.*.block"
        apply, params, buffers = fs.make_functional(net, mutable=model.mutable)
        batch = model.batch(case.samples)
    if case.mixed:
        options = {**options, "precision": fs.MixedPrecision(torch.bfloat16, torch.float32)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that BatchNorm is a unit of its own in mixed precision
        local = [f"{unit}.{leaf}" for leaf in model.local]
        plan = fs.make_plan(params, mesh, units=[unit], local=local, offload=case.offload, **{**options, **case.plan})
    schedule = None if case.schedule is None else fs.make_schedule(plan, **case.schedule)
    # Why not all units: in mixed precision each BatchNorm is a unit inside a block.
    remat = tuple(name for name in plan.units if name.count(".") == 1) if case.remat == "remat" else ()
    cls, settings = case.optimizer
    optimizer = fs.torch_optimizer(getattr(torch.optim, cls), lr=1e-3, **settings)
    return Setup(
        case=case, model=model, mesh=mesh, apply=apply, params=params, buffers=buffers, plan=plan, schedule=schedule,
        remat=remat, optimizer=optimizer, batch=batch,
    )  # fmt: skip


def make_step(setup: Setup) -> tuple[Callable[..., Any], fs.TrainState]:
    """Return the step of a case, and the state before the first step; shards are constant."""
    model, plan, mesh = setup.model, setup.plan, setup.mesh
    sharded = fs.fully_shard(setup.apply, plan, mesh, schedule=setup.schedule, remat=setup.remat)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> Any:
        inputs, targets = batch
        out = sharded(shards, buffers, inputs)
        return (model.loss(out[0], targets), out[1]) if model.mutable else model.loss(out, targets)

    step = fs.make_train_step(loss_fn, setup.optimizer, plan, mesh, mutable=model.mutable, **setup.case.step)
    shards: dict[str, Any] = {}
    for unit in plan.unit_list:
        options = {"device": "cpu" if unit.offload else mesh.device}
        shards[unit.name] = {
            buffer.key: torch.full((buffer.shard_numel,), 0.01, dtype=getattr(torch, buffer.dtype), **options)
            for buffer in unit.buffers
        }
    return step, step.init(shards, setup.buffers)


def measure(case: Case, mesh: fs.Mesh | None = None) -> Measured:
    """Run two steps of a case, by default among ranks that do not exist, and return their memory."""
    setup = prepare(case, mesh)
    step, state = make_step(setup)
    storages, batch, device = Storages(), setup.batch, setup.mesh.device.type
    del setup
    storages.hold((state.shards, state.buffers, batch))
    peaks, between = [], 0
    with storages, _attention_of_cpu():
        for _ in range(2):
            gc.collect()
            between = storages.live[device]
            storages.reset()
            gc.disable()  # so that a cycle, which would keep memory, shows in every run
            state, _ = step(state, batch)
            gc.enable()
            peaks.append((storages.peak[device], storages.peak["cpu"]))
    (first, _), (peak, host) = peaks
    return Measured(first, peak, between, host if case.offload else None)


@contextlib.contextmanager
def _attention_of_cpu() -> Iterator[None]:
    """Compute attention on the meta device and on fake tensors as on the CPU, not by torch's fallback."""
    usual = F.scaled_dot_product_attention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
        if not q.is_meta and not (q.is_cuda and is_fake(q)):
            return usual(q, k, v, is_causal=is_causal)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=is_causal)[0]

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


def main() -> None:
    """Measure all cases, and write them to the file."""
    torch.set_num_threads(1)  # the models are small, and threads wait for each other
    lines = [f"{json.dumps(name)}: {json.dumps(measure(CASES[name])._asdict())}" for name in progress(CASES, "measuring")]
    version = json.dumps(torch.__version__.partition("+")[0])
    FILE.write_text(f'{{"torch": {version}, "cases": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
