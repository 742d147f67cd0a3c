"""The models of PyTorch's own FSDP tests, unchanged: training has the numbers of DistributedDataParallel."""

from __future__ import annotations

import collections
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import funcshard as fs
from tests.pairwise import pairwise
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS = 2  # in the second step the optimizers have state
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
PREFETCH = tuple(itertools.product(("pre", "post", None), (True, False)))  # in backward, in forward
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3}),
}
# Each two of these meet. A unit of no_shard is gathered neither in forward nor in backward, so a
# schedule changes nothing there.
ROWS = pairwise(
    {"optimizer": list(OPTIMIZERS), "strategy": STRATEGIES, "schedule": PREFETCH, "offload": (False, True)},
    lambda row: row["strategy"] != "no_shard" or row["schedule"] == PREFETCH[0],
)
WAY = ("strategy", "schedule", "offload")
NESTED, SHARED, EXPERTS = "NestedWrappedModule", "TransformerWithSharedParams", "MixtureOfExperts"
MODELS = (NESTED, "AlwaysWrapNestedWrappedModule", SHARED, EXPERTS)
CPU = torch.device("cpu")
FP16 = fs.MixedPrecision(torch.float16, torch.float16, torch.float16)
CASTS_NOTHING = fs.MixedPrecision()


def theirs(name: str, rank: int, world_size: int, group: Any = None) -> nn.Module:
    """Return PyTorch's model ``name`` for one rank, without FSDP around any part of it.

    Call this in the processes of the ranks only: the import changes the settings of logging,
    hypothesis and torch's backends.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing torch's test tools warns
        common = importlib.import_module("torch.testing._internal.common_fsdp")
        group = group or common.DummyProcessGroup(rank, world_size)
        modes = (common.FSDPInitMode.NO_FSDP, common.DEVICEInitMode.DEVICE_NEVER)
        return getattr(common, name).init(group, *modes, deterministic=True)


def units_of(name: str, module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the units that upstream wraps, and those of them that are local to each rank."""
    if name == NESTED:
        return ["module.1", "module.1.0", "module.2"], []
    if name == EXPERTS:
        return ["module.1", "module.2"], ["module.2"]
    if name == SHARED:
        return fs.wrap.by_class(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)(module), []
    return fs.wrap.always()(module), []


class Sharded:
    """One of PyTorch's models on one rank, sharded in one way."""

    def __init__(self, mesh: fs.Mesh, name: str, *, schedule: Any = PREFETCH[0], **options: Any) -> None:
        warnings.filterwarnings("ignore", "the forward of .* changed buffers")  # of BatchNorm, which nothing here reads
        self.mesh, self.module = mesh, theirs(name, mesh.rank, mesh.world_size)
        chosen, local = units_of(name, self.module)
        self.apply, self.params, self.buffers = fs.make_functional(self.module)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.plan = fs.make_plan(self.params, mesh, units=chosen, local=local, **options)
        words = "ignored_classes of the precision hold BatchNorm1d: 'bn' become units of their own"
        assert all(words in str(warning.message) for warning in said)
        assert bool(said) == ("bn" in self.plan.units and not any(".bn" in unit or unit == "bn" for unit in chosen))
        # If BatchNorm is a unit, it runs after the embedding and before any layer.
        order = sorted(self.plan.units, key=lambda unit: unit != "bn") if "bn" in self.plan.units else None
        backward, forward = schedule
        self.schedule = fs.make_schedule(self.plan, order, forward_prefetch=forward, backward_prefetch=backward)
        self.run = fs.fully_shard(self.apply, self.plan, mesh, schedule=self.schedule)
        self.shards, self.batch = fs.shard(self.params, self.plan, mesh), self.module.get_input(CPU)

    def loss(self, shards: Any, buffers: Any, batch: Any) -> torch.Tensor:
        return self.module.get_loss(batch, self.run(shards, buffers, *batch))

    def step(self, cls: Any = torch.optim.SGD, **options: Any) -> tuple[Any, fs.TrainState]:
        optimizer = fs.torch_optimizer(cls, **options or {"lr": 0.01, "momentum": 0.9})
        step = fs.make_train_step(self.loss, optimizer, self.plan, self.mesh)
        return step, step.init(self.shards, self.buffers)


# --- training -------------------------------------------------------------------------------------


def train(mesh: fs.Mesh, name: str, row: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    sharded, (cls, settings) = Sharded(mesh, name, **{key: row[key] for key in WAY}), OPTIMIZERS[row["optimizer"]]
    (step, state), losses = sharded.step(cls, **settings), []
    for _ in range(STEPS):
        with fs.record_events() as events:
            state, metrics = step(state, sharded.batch)
        assert of_units(events) == fs.predict_events(sharded.plan, sharded.run.schedule), row
        losses.append(metrics["loss"].item())
    return losses, fs.gather(state.shards, sharded.plan, mesh)


def of_units(events: Iterable[fs.Event]) -> tuple[fs.Event, ...]:
    return tuple(event for event in events if event.unit is not None)  # the reduction of the loss belongs to no unit


def copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in module.named_parameters()}


def train_reference(mesh: fs.Mesh, name: str, optimizer: str) -> tuple[list[float], dict[str, Any]]:
    """Train with DistributedDataParallel; the mixture of experts reduces its shared gradients itself, as upstream."""
    module = theirs(name, mesh.rank, mesh.world_size, dist.group.WORLD)
    run, start = module if name == EXPERTS else DistributedDataParallel(module), copies(module)
    cls, options = OPTIMIZERS[optimizer]
    optimize, losses = cls(module.parameters(), **options), []
    for _ in range(STEPS):
        batch = module.get_input(CPU)
        optimize.zero_grad()
        loss = module.get_loss(batch, run(*batch))
        module.run_backward(loss)
        optimize.step()
        losses.append(fs.pmean(loss.detach(), mesh).item())
    moved = {key for key, value in copies(module).items() if (value - start[key]).abs().max() > 1e-4}
    assert moved == start.keys(), "parameters that stay show nothing"
    return losses, copies(module)


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {key for key, value in one.items() if not torch.equal(value, other[key])}


def train_every_way(mesh: fs.Mesh, name: str) -> dict[str, torch.Tensor]:
    """Compare each way to train with the reference; return this rank's parameters."""
    references = {optimizer: train_reference(mesh, name, optimizer) for optimizer in OPTIMIZERS}
    for row in ROWS:
        (losses, params), (wanted_losses, wanted) = train(mesh, name, row), references[row["optimizer"]]
        assert (losses, differences(params, wanted)) == (wanted_losses, set()), row
    return params


@pytest.mark.nightly(one_in=4)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_ddp_to_the_bit_and_communicates_as_predicted(name):
    first, second = run_ranks(train_every_way, 2, name, timeout=200)
    # Experts are each rank's own.
    assert differences(first, second) == ({"module.2.weight", "module.2.bias"} if name == EXPERTS else set())


# --- every schedule -------------------------------------------------------------------------------


def on_every_schedule(mesh: fs.Mesh, check: Callable[..., None], precisions: Iterable[Any] = (None,)) -> None:
    for schedule, precision in zip(PREFETCH, itertools.cycle(precisions)):  # each precision meets several schedules
        try:
            check(mesh, schedule=schedule, precision=precision)
        except Exception as error:
            error.add_note(f"with prefetch {schedule} and {precision}")
            raise


def change_after_sharding(mesh: fs.Mesh, **options: Any) -> None:
    sharded = Sharded(mesh, SHARED, **options)
    call = lambda run, params: run(params, sharded.buffers, *sharded.batch)  # noqa: E731
    before = call(sharded.run, sharded.shards)
    first = next(iter(sharded.params))
    torch.manual_seed(8)
    changed = {**sharded.params, first: nn.init.normal_(torch.empty_like(sharded.params[first]))}
    new = fs.shard(changed, sharded.plan, mesh)[""]["float32"]
    sharded.shards[""]["float32"].copy_(new)  # in place, as users write it
    after = call(sharded.run, sharded.shards)
    assert torch.equal(before, call(sharded.apply, sharded.params))
    assert torch.equal(after, call(sharded.apply, changed))
    assert not torch.allclose(before, after)


@pytest.mark.nightly
def test_a_parameter_changed_after_sharding_is_seen_by_the_next_forward():
    run_ranks(on_every_schedule, 2, change_after_sharding, (None, CASTS_NOTHING))


def once_each(mesh: fs.Mesh, **options: Any) -> None:
    """Check the events of a first step, and of a step after the shards went through a state dict."""
    sharded = Sharded(mesh, SHARED, **options)
    step, state = sharded.step()
    units = list(sharded.plan.units)
    for loaded in (False, True):
        if loaded:
            buffers = sharded.apply.persistent(sharded.buffers)
            state_dict = fs.to_state_dict(state.shards, sharded.plan, mesh, buffers=buffers)
            state = state._replace(shards=fs.from_state_dict(state_dict, sharded.plan, mesh))
        with fs.record_events() as events:
            state, _ = step(state, sharded.batch)
        sent = of_units(events)
        assert sent == fs.predict_events(sharded.plan, sharded.run.schedule)
        kinds = {kind: sorted(e.unit for e in sent if e.kind == kind) for kind in ("reduce_scatter", "all_gather")}
        # Gathered twice, except for the root, which comes first.
        assert kinds == {"reduce_scatter": sorted(units), "all_gather": sorted([*units, *units[1:]])}


def test_each_unit_is_gathered_again_and_reduced_once_a_backward_also_after_a_state_dict():
    run_ranks(on_every_schedule, 2, once_each, (None, CASTS_NOTHING, FP16), timeout=120)


class Product(torch.autograd.Function):
    """``x @ weight.T``, which notes the weight that its backward gets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, noted: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.noted = noted
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.noted("backward", weight)
        return grad @ weight, grad.T @ x, None


class Noted(list):
    """Notes on a leaf at each of its uses; ``deepcopy`` of a module keeps the same list."""

    def __call__(self, when: str, leaf: torch.Tensor) -> None:
        size = leaf.untyped_storage().nbytes() // leaf.element_size()
        self.append((when, type(leaf), leaf._base is not None or when == "backward", size > leaf.numel()))

    def __deepcopy__(self, memo: Any) -> Noted:
        return self


class Linear(nn.Linear):
    def __init__(self, noted: Noted) -> None:
        super().__init__(3, 3)
        self.noted = noted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noted("forward", self.weight)
        return Product.apply(x, self.weight, self.noted) + self.bias


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_leaves_are_plain_views_in_forward_and_backward(strategy):
    noted = Noted()
    net = nn.Sequential(*[Linear(noted) for _ in range(5)])
    apply, params, buffers = fs.make_functional(net)

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(params, mesh, units=fs.wrap.by_class(nn.Linear)(net), strategy=strategy)
        shards = fs.shard(params, plan, mesh)
        for backward, forward in PREFETCH:
            schedule = fs.make_schedule(plan, forward_prefetch=forward, backward_prefetch=backward)
            sharded = fs.fully_shard(apply, plan, mesh, schedule=schedule)
            gradient = fs.value_and_grad(lambda s, x, f=sharded: f(s, buffers, x).sum())
            for seed in range(3):
                gradient(shards, torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_())

    fs.simulate(main, 2)
    # a plain tensor that is a view of the whole flat buffer: weight, bias and padding
    uses = 2 * len(PREFETCH) * 3 * 5  # ranks, schedules, inputs, layers
    expected = {("forward", torch.Tensor, True, True): uses, ("backward", torch.Tensor, True, True): uses}
    assert collections.Counter(noted) == expected
