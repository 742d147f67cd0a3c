"""The models of PyTorch's own FSDP tests, unchanged: training has the numbers of DistributedDataParallel."""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import funcshard as fs
from tests.pairwise import pairwise
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow  # whichever test comes first trains for all

STEPS = 2  # in the second step the optimizers have state
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
PREFETCH = tuple(itertools.product(("pre", "post", None), (True, False)))
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


def _text(strategy: str, backward: str | None, forward: bool, offload: bool) -> str:
    return f"{strategy}, backward {backward}, forward {'ahead' if forward else 'on demand'}{', offloaded' * offload}"


WAYS = {_text(*way): way for way in ((row["strategy"], *row["schedule"], row["offload"]) for row in ROWS)}
CASES = [(row["optimizer"], _text(row["strategy"], *row["schedule"], row["offload"])) for row in ROWS]
MODELS = ("NestedWrappedModule", "AlwaysWrapNestedWrappedModule", "TransformerWithSharedParams", "MixtureOfExperts")
SHARED = "TransformerWithSharedParams"
CPU = torch.device("cpu")


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
    if name == "NestedWrappedModule":
        return ["module.1", "module.1.0", "module.2"], []
    if name == "MixtureOfExperts":
        return ["module.1", "module.2"], ["module.2"]
    if name == "TransformerWithSharedParams":
        return fs.wrap.by_class(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)(module), []
    return fs.wrap.always()(module), []


def sharded_by(
    name: str,
    mesh: fs.Mesh,
    strategy: str,
    backward: str | None,
    forward: bool,
    offload: bool = False,
    precision: Any = None,
) -> Any:
    warnings.filterwarnings("ignore", "the forward of .* changed buffers")  # of BatchNorm, which nothing here reads
    module = theirs(name, mesh.rank, mesh.world_size)
    units, local = units_of(name, module)
    apply, params, buffers = fs.make_functional(module)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ignored_classes of the precision hold BatchNorm1d: 'bn' become units")
        plan = fs.make_plan(params, mesh, units=units, strategy=strategy, local=local, offload=offload, precision=precision)
    # If BatchNorm is a unit, it runs after the embedding and before any layer.
    order = sorted(plan.units, key=lambda unit: unit != "bn") if "bn" in plan.units else None
    schedule = fs.make_schedule(plan, order, forward_prefetch=forward, backward_prefetch=backward)
    return module, fs.fully_shard(apply, plan, mesh, schedule=schedule), params, buffers


def train(
    name: str, optimizer: str, mesh: fs.Mesh, way: tuple[str, str | None, bool, bool]
) -> tuple[list[float], dict[str, Any]]:
    module, sharded, params, buffers = sharded_by(name, mesh, *way)
    cls, options = OPTIMIZERS[optimizer]

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> torch.Tensor:
        return module.get_loss(batch, sharded(shards, buffers, *batch))

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(cls, **options), sharded.plan, mesh)
    state, losses = step.init(fs.shard(params, sharded.plan, mesh), buffers), []
    for _ in range(STEPS):
        state, metrics = step(state, module.get_input(CPU))
        losses.append(metrics["loss"].item())
    return losses, fs.gather(state.shards, sharded.plan, mesh)


def train_reference(name: str, optimizer: str, mesh: fs.Mesh) -> tuple[list[float], dict[str, Any]]:
    """Train with DistributedDataParallel; the mixture of experts reduces its shared gradients itself, as upstream."""
    module = theirs(name, mesh.rank, mesh.world_size, dist.group.WORLD)
    run = module if name == "MixtureOfExperts" else DistributedDataParallel(module)
    cls, options = OPTIMIZERS[optimizer]
    optimizer, losses = cls(module.parameters(), **options), []
    for _ in range(STEPS):
        batch = module.get_input(CPU)
        optimizer.zero_grad()
        loss = module.get_loss(batch, run(*batch))
        module.run_backward(loss)
        optimizer.step()
        losses.append(fs.pmean(loss.detach(), mesh).item())
    return losses, {key: value.detach().clone() for key, value in module.named_parameters()}


def train_every_way(mesh: fs.Mesh, name: str) -> dict[tuple[str, str], Any]:
    runs: dict[tuple[str, str], Any] = {}
    for optimizer in OPTIMIZERS:
        runs |= {(optimizer, text): train(name, optimizer, mesh, WAYS[text]) for each, text in CASES if each == optimizer}
        runs[optimizer, "reference"] = train_reference(name, optimizer, mesh)
    start = theirs(name, mesh.rank, mesh.world_size)
    return {**runs, ("start", "start"): {key: value.detach().clone() for key, value in start.named_parameters()}}


@functools.cache
def outcome(name: str) -> Any:
    try:
        return run_ranks(train_every_way, 2, name, timeout=200)
    except Exception as error:  # every case of the table reports it, but the training runs once
        return error


def runs_of(name: str) -> list[dict[tuple[str, str], Any]]:
    found = outcome(name)
    if isinstance(found, Exception):
        raise found
    return found


@pytest.mark.parametrize(("optimizer", "way"), CASES)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_ddp_to_the_bit(name, optimizer, way):
    for runs in runs_of(name):
        losses, params = runs[optimizer, way]
        expected_losses, expected = runs[optimizer, "reference"]
        assert losses == expected_losses
        assert params.keys() == expected.keys()
        assert [key for key, value in expected.items() if not torch.equal(params[key], value)] == []


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_that_are_compared_have_moved(name):
    for runs in runs_of(name):
        start = runs["start", "start"]
        _, params = runs["SGD", "reference"]
        moved = [key for key, value in start.items() if (params[key] - value).abs().max() > 1e-4]
        assert set(start) == set(moved)


def test_experts_stay_each_ranks_own_and_everything_else_is_shared():
    runs = runs_of("MixtureOfExperts")
    for case in CASES:
        (_, first), (_, second) = (ranks[case] for ranks in runs)
        different = {key for key, value in first.items() if not torch.equal(second[key], value)}
        assert different == {"module.2.weight", "module.2.bias"}


# --- other tests of that file --------------------------------------------------------------------------------------------


def change_after_sharding(mesh: fs.Mesh, backward: str | None, forward: bool, precision: Any) -> dict[str, Any]:
    module, sharded, params, buffers = sharded_by(SHARED, mesh, "full_shard", backward, forward, precision=precision)
    batch, plan = module.get_input(CPU), sharded.plan
    shards = fs.shard(params, plan, mesh)
    before = sharded(shards, buffers, *batch)
    first = next(iter(params))
    torch.manual_seed(8)
    changed = {**params, first: nn.init.normal_(torch.empty_like(params[first]))}
    shards[""]["float32"].copy_(fs.shard(changed, plan, mesh)[""]["float32"])  # in place, as users write it
    after = sharded(shards, buffers, *batch)
    expected = {"same": sharded.apply(params, buffers, *batch), "expected": sharded.apply(changed, buffers, *batch)}
    return {"before": before, "after": after, **expected}


def without_gradients(mesh: fs.Mesh, backward: str | None, forward: bool, precision: Any) -> dict[str, Any]:
    module, sharded, params, buffers = sharded_by(SHARED, mesh, "full_shard", backward, forward, precision=precision)
    batch, plan = module.get_input(CPU), sharded.plan
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
    step = fs.make_train_step(lambda s, b, x: module.get_loss(x, sharded(s, b, *x)), optimizer, plan, mesh)
    state, _ = step(step.init(fs.shard(params, plan, mesh), buffers), batch)
    evaluated = fs.fully_shard(sharded.apply.eval(), plan, mesh, schedule=sharded.schedule)
    with_graph = evaluated(state.shards, buffers, *batch)
    with torch.no_grad(), fs.record_events() as events:
        without = evaluated(state.shards, buffers, *batch)
    full = fs.gather(state.shards, plan, mesh)
    unsharded = sharded.apply.eval()
    if precision is not None:  # the reference: the same dtypes on one rank
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone = fs.make_plan(params, 1, strategy="no_shard", precision=precision)
        full, unsharded = fs.shard(full, alone, fs.Mesh()), fs.fully_shard(unsharded, alone, fs.Mesh())
    return {
        "eval": with_graph.detach(), "no_grad": without, "unsharded": unsharded(full, buffers, *batch),
        "gathered": [event.unit for event in events], "order": list(sharded.schedule.order),
    }  # fmt: skip


def once_each(mesh: fs.Mesh, backward: str | None, forward: bool, precision: Any) -> list[Any]:
    """Return recorded and predicted events of a first step, and of a step after shards went through a state dict."""
    module, sharded, params, buffers = sharded_by(SHARED, mesh, "full_shard", backward, forward, precision=precision)
    batch, plan = module.get_input(CPU), sharded.plan
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
    step = fs.make_train_step(lambda s, b, x: module.get_loss(x, sharded(s, b, *x)), optimizer, plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    found = []
    for loaded in (False, True):
        if loaded:
            state_dict = fs.to_state_dict(state.shards, plan, mesh, buffers=sharded.apply.persistent(buffers))
            state = state._replace(shards=fs.from_state_dict(state_dict, plan, mesh))
        with fs.record_events() as events:
            state, _ = step(state, batch)
        kept = [event for event in events if event.unit is not None]  # the reduction of the loss belongs to no unit
        found.append((kept, list(fs.predict_events(plan, sharded.schedule)), list(plan.units)))
    return found


ALL_PREFETCH = [pytest.param(*p, id=f"backward {p[0]}, forward {'ahead' if p[1] else 'on demand'}") for p in PREFETCH]


FP16 = fs.MixedPrecision(torch.float16, torch.float16, torch.float16)
PRECISIONS = {"": None, "a precision that casts nothing": fs.MixedPrecision(), "float16": FP16}


def precisions(*names: str) -> Any:
    return pytest.mark.parametrize("precision", [PRECISIONS[name] for name in names], ids=names)


@precisions("", "a precision that casts nothing")
@pytest.mark.parametrize(("backward", "forward"), ALL_PREFETCH)
def test_a_parameter_changed_after_sharding_is_seen_by_the_next_forward(backward, forward, precision):
    for out in run_ranks(change_after_sharding, 2, backward, forward, precision):
        torch.testing.assert_close(out["before"], out["same"], rtol=0, atol=0)
        torch.testing.assert_close(out["after"], out["expected"], rtol=0, atol=0)
        assert not torch.allclose(out["before"], out["after"])


@precisions("", "float16")
@pytest.mark.parametrize(("backward", "forward"), ALL_PREFETCH)
def test_eval_equals_no_grad_after_a_training_step(backward, forward, precision):
    for out in run_ranks(without_gradients, 2, backward, forward, precision):
        assert out["eval"].dtype == (torch.float32 if precision is None else torch.float16)
        torch.testing.assert_close(out["eval"], out["no_grad"], rtol=0, atol=0)
        torch.testing.assert_close(out["eval"], out["unsharded"])
        assert out["gathered"] == out["order"]


@precisions("", "a precision that casts nothing", "float16")
@pytest.mark.parametrize(("backward", "forward"), ALL_PREFETCH)
def test_each_unit_is_gathered_again_and_reduced_once_a_backward_also_after_a_state_dict(backward, forward, precision):
    for found in run_ranks(once_each, 2, backward, forward, precision):
        for events, predicted, units in found:
            assert events == predicted
            reduced = [event.unit for event in events if event.kind == "reduce_scatter"]
            gathered = [event.unit for event in events if event.kind == "all_gather"]
            assert sorted(reduced) == sorted(units)
            assert sorted(gathered) == sorted([*units, *units[1:]])  # twice, except for the root, which comes first


def nested_events(mesh: fs.Mesh, backward: str | None, forward: bool) -> list[Any]:
    """Return recorded and predicted events of the second step of the models with nested units."""
    found = []
    for name in ("NestedWrappedModule", "AlwaysWrapNestedWrappedModule"):
        module, sharded, params, buffers = sharded_by(name, mesh, "full_shard", backward, forward)
        batch, shards = module.get_input(CPU), fs.shard(params, sharded.plan, mesh)
        for _ in range(2):
            with fs.record_events() as events:
                fs.value_and_grad(lambda s: module.get_loss(batch, sharded(s, buffers, *batch)))(shards)  # noqa: B023
        found.append((tuple(events), fs.predict_events(sharded.plan, sharded.schedule)))
    return found


@pytest.mark.parametrize(("backward", "forward"), ALL_PREFETCH)
def test_the_collectives_of_nested_units_are_the_predicted_ones(backward, forward):
    for found in run_ranks(nested_events, 2, backward, forward):
        for events, predicted in found:
            assert len(events) > 0
            assert events == predicted


class Product(torch.autograd.Function):
    """``x @ weight.T``, which notes the weight that its backward gets."""

    seen: list[tuple[type, bool]]

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


@pytest.mark.parametrize(("backward", "forward"), ALL_PREFETCH)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_leaves_are_plain_views_in_forward_and_backward(strategy, backward, forward):
    noted = Noted()
    net = nn.Sequential(*[Linear(noted) for _ in range(5)])
    apply, params, buffers = fs.make_functional(net)

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(params, mesh, units=fs.wrap.by_class(nn.Linear)(net), strategy=strategy)
        schedule = fs.make_schedule(plan, forward_prefetch=forward, backward_prefetch=backward)
        sharded = fs.fully_shard(apply, plan, mesh, schedule=schedule)
        shards = fs.shard(params, plan, mesh)
        for seed in range(3):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            fs.value_and_grad(lambda s, x=x: sharded(s, buffers, x).sum())(shards)

    fs.simulate(main, 2)
    # a plain tensor that is a view of the whole flat buffer: weight, bias and padding
    uses = 2 * 3 * 5  # ranks, steps, layers
    expected = {("forward", torch.Tensor, True, True): uses, ("backward", torch.Tensor, True, True): uses}
    assert collections.Counter(noted) == expected
