"""Training steps equal a plain loop on the whole model and the whole batch."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import by_hand, mlp, of_module, same_bits
from tests.ranks import on_ranks

model = partial(mlp, 3, 5, 5, 2, dtype=torch.float32)
ADAMW = fs.torch_optimizer(torch.optim.AdamW, lr=0.05, fused=True)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step))


def setup(mesh: fs.Mesh, net: nn.Module) -> Any:
    plan, sharded, shards = of_module(mesh, net, fs.wrap.by_class(nn.Linear)(net))
    return sharded, plan, shards, {}


def mean_square(sharded: Any) -> Any:
    return lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()


def tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)]


def memory(state: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in tensors(state)]


@on_ranks(2)
def test_the_state_is_a_pytree_that_counts_steps_and_is_donated_to_a_torch_optimizer(mesh: fs.Mesh) -> None:
    sharded, plan, shards, buffers = setup(mesh, model(frozen=["0.bias", "2.weight", "2.bias"]))
    train = fs.make_train_step(mean_square(sharded), ADAMW, plan, mesh)
    state, pointers = train.init(shards, buffers), []
    for step in range(3):
        assert state.step == step
        pointers.append(memory(state))
        state, _ = train(state, batch(step))
    assert memory(state) == pointers[2]  # pointers[0] has no state of the optimizer
    assert memory(state.shards) == pointers[0]
    leaves, put_back = tree.flatten(state)
    assert isinstance(put_back(leaves), fs.TrainState)
    assert not any(leaf.requires_grad for leaf in tensors(state))
    assert state.opt_state["steps"] == 3
    held = {unit: {key: sorted(entries) for key, entries in own.items()} for unit, own in state.opt_state["leaves"].items()}
    kept = {"float32": ["exp_avg", "exp_avg_sq", "step"]}
    assert held == {"0": kept, "2": {}, "4": kept}  # frozen leaves have none


def sum_times_mean(leaves: Any, x: torch.Tensor) -> torch.Tensor:
    return leaves["w"].sum() * x.mean()


HYBRID, CUT = {"replicate": 2, "shard": 3}, {"shard": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("world", "weights", "options", "expected"),
    [
        pytest.param(HYBRID, None, {}, [0] * 6, id="those of rank 0"),
        pytest.param(HYBRID, [0, 0, 0, 0, 1, 1], {}, [4] * 6, id="those of the first rank with data"),
        pytest.param(HYBRID, [0, 0, 0, 0, 1, 1], {"accumulate": 2, "reduce": "each"}, [44] * 6, id="over micro-batches"),
        pytest.param(HYBRID, [0, 0, 0, 0, 1, 1], {"accumulate": 2, "reduce": "once"}, [44] * 6, id="reduced once"),
        pytest.param(CUT, None, {}, [0, 1, 0, 1], id="apart along model axes"),
        pytest.param(CUT, [0, 0, 1, 2], {}, [2, 3, 2, 3], id="apart along model axes, with weights"),
    ],
)
@on_ranks()
def test_new_buffers_are_those_of_one_data_rank(
    mesh: fs.Mesh, world: Any, weights: Any, options: Any, expected: list[int]
) -> None:
    plan, f, shards = by_hand(mesh, {"w": torch.ones(3)}, sum_times_mean)
    weighted, buffers = weights is not None, {"n": torch.tensor(0)}

    def loss_fn(shards: Any, buffers: Any, x: torch.Tensor) -> Any:
        rest = {"n": buffers["n"] * 10 + mesh.rank}, len(x)
        return (f(shards[""], x), weights[mesh.rank], *rest) if weighted else (f(shards[""], x), *rest)

    train = fs.make_train_step(loss_fn, ADAMW, plan, mesh, has_aux=True, mutable=True, weighted=weighted, **options)
    state, metrics = train(train.init(shards, buffers), torch.ones(2))
    assert metrics["aux"] == ([1, 1] if options else 2)
    assert buffers["n"] == 0
    assert world is CUT or metrics.get("weight", 0) == 2 * weighted * options.get("accumulate", 1)
    assert state.buffers["n"] == expected[mesh.rank]


@pytest.mark.parametrize("reduce", ["each", "once"])
@on_ranks(2)
def test_a_micro_batch_without_data_leaves_no_trace_in_buffers(mesh: fs.Mesh, reduce: str) -> None:
    plan, f, shards = by_hand(mesh, {"w": torch.ones(3)}, sum_times_mean)

    def loss_fn(shards: Any, buffers: Any, rows: Any) -> Any:
        x, weight = rows
        return f(shards[""], x), weight.sum(), {"mean": buffers["mean"] + x.mean()}

    train = fs.make_train_step(loss_fn, ADAMW, plan, mesh, mutable=True, weighted=True, accumulate=3, reduce=reduce)
    rows = torch.tensor([1.0, math.nan, 2.0]), torch.tensor([1.0, 0.0, 1.0])
    state, metrics = train(train.init(shards, {"mean": torch.tensor(0.0)}), rows)
    assert metrics["loss"] == 4.5
    assert state.buffers["mean"] == 3.0


@pytest.mark.parametrize(
    ("compose", "keywords"),
    [
        (fs.value_and_grad, {}),
        (partial(fs.value_and_grad, has_aux=True, divisor=3.0), {"has_aux": True, "divisor": 3.0}),
        (partial(fs.accumulate, micro_batches=3, reduce="once"), {"accumulate": 3, "reduce": "once"}),
        (partial(fs.accumulate, micro_batches=2, has_aux=True), {"accumulate": 2, "has_aux": True}),
    ],
    ids=["one batch", "an aux and a divisor", "accumulated", "accumulated, an aux"],
)
@on_ranks(2)
def test_a_step_of_a_gradient_function_is_the_step_with_its_options(
    mesh: fs.Mesh, compose: Any, keywords: dict[str, Any]
) -> None:
    sharded, plan, shards, buffers = setup(mesh, model())
    loss_of = mean_square(sharded)

    def loss_fn(*args: Any) -> Any:
        loss = loss_of(*args)
        return (loss, {"loss": loss}) if keywords.get("has_aux") else loss

    make = partial(fs.make_train_step, optimizer=ADAMW, plan=plan, mesh=mesh, max_norm=1.0)
    steps = make(compose(loss_fn)), make(loss_fn, **keywords)
    same_bits(*(step(step.init(fs.copy(shards), buffers), batch(0)[:6]) for step in steps))


@pytest.mark.parametrize("scaler", [None, fs.GradScaler(init_scale=1024.0)], ids=["plain", "scaled"])
@on_ranks(2)
def test_an_infinite_max_norm_measures_and_changes_nothing(mesh: fs.Mesh, scaler: fs.GradScaler | None) -> None:
    net = model()
    net(batch(0)).square().mean().backward()
    sharded, plan, shards, buffers = setup(mesh, model())
    (plain, without), (measured, metrics) = (
        step(step.init(fs.copy(shards), buffers), batch(0).chunk(2)[mesh.rank])
        for step in (
            fs.make_train_step(mean_square(sharded), ADAMW, plan, mesh, scaler=scaler, max_norm=bound)
            for bound in (None, np.float32(math.inf))
        )
    )
    torch.testing.assert_close(metrics.pop("grad_norm"), nn.utils.get_total_norm([p.grad for p in net.parameters()]))
    assert metrics.keys() == without.keys()
    same_bits(measured, plain)


@on_ranks(2)
def test_a_step_hands_gradients_to_on_grads_before_it_clips(mesh: fs.Mesh) -> None:
    sharded, plan, shards, buffers = setup(mesh, model())
    zero = lambda unit, grads: {path: torch.zeros_like(grad) for path, grad in grads.items()}  # noqa: E731
    train = fs.make_train_step(mean_square(sharded), ADAMW, plan, mesh, max_norm=1.0, on_grads=zero)
    _, metrics = train(train.init(shards, buffers), batch(0))
    assert metrics["grad_norm"] == 0


@on_ranks(2)
def test_a_step_takes_the_mean_over_its_own_mesh(mesh: fs.Mesh) -> None:
    params = {"w": torch.zeros(2)}
    plan = fs.make_plan(params, mesh)
    # No unit is gathered: each rank's loss acts on its own shard.
    loss_fn = lambda shards, buffers, x: shards[""]["float32"].sum()  # noqa: E731
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=1.0), plan, mesh)
    state, _ = step(step.init(fs.shard(params, plan, mesh), {}), None)
    assert state.shards[""]["float32"].tolist() == [-0.5]


# --- a step donates its state ---------------------------------------------------------------------

X = batch(0)


class Case(NamedTuple):
    """What a use of an old state may need."""

    state: fs.TrainState
    step: Any
    sharded: Any
    plan: fs.Plan
    mesh: fs.Mesh
    optimizer: Any
    folder: Any

    @property
    def loss(self) -> Any:
        return lambda shards: self.sharded(shards, {}, X).square().mean()


NO_DECAY = {"paths": ["**.bias"], "weight_decay": 0.0}
OPTIMIZERS = {
    "adamw": lambda plan, mesh: fs.torch_optimizer(torch.optim.AdamW, lr=0.1),
    "adamw with groups": lambda plan, mesh: fs.torch_optimizer(
        torch.optim.AdamW, lr=0.1, groups=[NO_DECAY], plan=plan, mesh=mesh
    ),
    "muon": lambda plan, mesh: fs.muon(plan, mesh, lr=0.1),
}


def make(mesh: fs.Mesh, name: str = "adamw", folder: Any = None, **options: Any) -> Case:
    sharded, plan, shards, buffers = setup(mesh, model())
    optimizer = OPTIMIZERS[name](plan, mesh)
    step = fs.make_train_step(mean_square(sharded), optimizer, plan, mesh, **options)
    return Case(step.init(shards, buffers), step, sharded, plan, mesh, optimizer, folder)


USES = {
    "step": lambda c: c.step(c.state, X),
    "init of another run": lambda c: c.step.init(c.state.shards, {}) and c.step(c.step.init(c.state.shards, {}), X),
    "forward": lambda c: c.sharded(c.state.shards, {}, X),
    "value_and_grad": lambda c: fs.value_and_grad(c.loss)(c.state.shards),
    "torch.func.grad": lambda c: torch.func.grad(c.loss)(c.state.shards),
    "gather": lambda c: fs.gather(c.state.shards, c.plan, c.mesh),
    "to_state_dict": lambda c: fs.to_state_dict(c.state.shards, c.plan, c.mesh),
    "global_norm": lambda c: fs.global_norm(c.state.shards, c.plan, c.mesh),
    "save": lambda c: fs.save(c.folder / "x", c.state, c.plan, c.mesh),
    "save of the optimizer's state": lambda c: fs.save(c.folder / "y", c.state.opt_state, c.plan, c.mesh),
    "optimizer_to_state_dict": lambda c: fs.optimizer_to_state_dict(c.state.opt_state, c.optimizer, c.plan, c.mesh),
    "fs.copy": lambda c: fs.copy(c.state),
    "fs.copy of the optimizer's state": lambda c: fs.copy(c.state.opt_state),
    "deepcopy": lambda c: copy.deepcopy(c.state.shards),
    "an average": lambda c: tree.map(lambda x: 0.9 * x, c.state.shards),
    "a shape": lambda c: c.state.shards["0"]["float32"].shape,
    "numpy": lambda c: c.state.shards["0"]["float32"].numpy(),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2)
def test_every_use_of_a_donated_state_is_an_error_that_names_the_remedies(
    mesh: fs.Mesh, optimizer: str, tmp_path: Any
) -> None:
    case = make(mesh, optimizer, tmp_path)
    new, _ = case.step(case.state, X)
    for name, use in USES.items():
        with pytest.raises((RuntimeError, ValueError), match=r"donated") as error:
            use(case)
        if isinstance(error.value, RuntimeError):
            assert "fs.copy(state)" in str(error.value), name
            assert "donate=False" in str(error.value), name
    case.step(new, X)  # the new state is good


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2)
def test_an_optimizer_state_that_was_not_taken_back_is_noticed_in_the_next_step(mesh: fs.Mesh, optimizer: str) -> None:
    case = make(mesh, optimizer)
    params, opt_state = case.state.shards, case.state.opt_state
    grads = tree.map(torch.ones_like, params)
    params, _ = case.optimizer.step(grads, opt_state, params)
    with pytest.raises(RuntimeError, match="this optimizer state was donated"):
        case.optimizer.step(grads, opt_state, params)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("keep", ["fs.copy", "donate=False"])
@on_ranks(2)
def test_a_state_that_was_kept_has_its_old_values_and_runs_again_to_the_bit(
    mesh: fs.Mesh, keep: str, optimizer: str
) -> None:
    case = make(mesh, optimizer, donate=keep != "donate=False")
    state = case.step(case.state, X)[0]  # so that the optimizer's state holds tensors
    before = copy.deepcopy(state)
    kept = fs.copy(state) if keep == "fs.copy" else state
    first = case.step(state, X)[0]
    same_bits(kept, before)
    assert not torch.equal(first.shards["0"]["float32"], before.shards["0"]["float32"])
    same_bits(case.step(kept, X)[0], first)


def test_a_copy_is_of_the_same_dtypes_and_has_memory_of_its_own() -> None:
    state = {"a": torch.ones(2, dtype=torch.bfloat16, requires_grad=True), "b": [torch.arange(3), 1.5, None, "x"]}
    new = fs.copy(state)
    assert new["b"][1:] == [1.5, None, "x"]
    for old, own in ((state["a"], new["a"]), (state["b"][0], new["b"][0])):
        assert torch.equal(old, own)
        assert (old.dtype, old.requires_grad) == (own.dtype, own.requires_grad)
        assert old.data_ptr() != own.data_ptr()
    assert (new["a"] * 2).grad_fn is not None
    assert fs.copy(new["a"] * 2).grad_fn is None


def test_a_step_that_is_skipped_donates_nothing() -> None:
    case = make(fs.Mesh(), scaler=fs.GradScaler())
    state, metrics = case.step(case.state, X * float("inf"))
    assert metrics["found_inf"]
    assert torch.equal(case.state.shards["0"]["float32"], state.shards["0"]["float32"])


def test_a_donated_tensor_can_be_printed() -> None:
    case = make(fs.Mesh())
    case.step(case.state, X)
    assert "<tensor that was donated to a training step>" in repr(case.state)
    assert "<optimizer state that was donated to a step>" in repr(case.state)


def test_a_tensor_that_a_tree_holds_twice_is_donated_once() -> None:
    shared = torch.ones(2)
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.5)
    params = {"a": shared, "b": shared}
    new, _ = optimizer.step({"a": torch.ones(2), "b": torch.zeros(2)}, optimizer.init(params), params)
    assert new["a"].tolist() == [0.5, 0.5]


# --- metrics["local_loss"], without a collective more ---------------------------------------------


def losses(mesh: fs.Mesh, batch: Any, form: Any = lambda loss: loss, **options: Any) -> tuple[float, float]:
    """Return the metrics ``local_loss`` and ``loss`` of one step, on a batch of losses, and of weights."""
    plan, f, shards = by_hand(mesh, {"w": torch.ones(3)}, lambda leaves, x: (leaves["w"] * 0).sum() + x)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> Any:
        if not options.get("weighted"):
            return form(f(shards[""], batch.mean()))
        values, weights = batch
        total = weights.sum()
        return form(f(shards[""], (values * weights).sum() / total)), total

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh, **options)
    _, metrics = step(step.init(shards, {}), batch)
    return metrics["local_loss"].item(), metrics["loss"].item()


OPTIONS: dict[str, Any] = {"plain": {}, "accumulate": {"accumulate": 2}, "scaler": {"scaler": fs.GradScaler(init_scale=8.0)}}


# Of two micro-batches on each of three ranks: the losses, and their weights; a weight of zero divides zero by zero.
LOSSES = [[1.0, 4.0], [11.0, 14.0], [21.0, 24.0]]
WEIGHTS: dict[str, Any] = {
    "mean": None,
    "weighted": [[1.0, 3.0], [2.0, 6.0], [3.0, 5.0]],
    "a rank without data": [[1.0, 3.0], [2.0, 6.0], [0.0, 0.0]],
    "micro-batches without data": [[0.0, 2.0], [1.0, 0.0], [1.0, 2.0]],
}


def weighted_mean(values: Any, weights: Any) -> float:
    return np.average(values, weights=weights).item() if np.any(weights) else 0.0


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("options", [*OPTIONS.values(), {"divisor": 7}], ids=[*OPTIONS, "divisor"])
@on_ranks(3)
def test_it_is_the_mean_over_this_ranks_batch_and_the_loss_is_the_mean_of_all(
    mesh: fs.Mesh, options: Any, weights: str
) -> None:
    weights_of = WEIGHTS[weights] or [[1.0, 1.0]] * 3
    batch = torch.tensor(LOSSES[mesh.rank]), torch.tensor(weights_of[mesh.rank])
    found = losses(mesh, batch if WEIGHTS[weights] else batch[0], weighted=bool(WEIGHTS[weights]), **options)
    wanted = weighted_mean(LOSSES[mesh.rank], weights_of[mesh.rank]), weighted_mean(LOSSES, weights_of)
    assert found == pytest.approx(wanted)


LOW = [2.984375, 3.015625, 3.0, 2.984375, 3.015625, 3.0, 3.03125, 2.96875]  # numbers of bfloat16, which their sum is not


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("weights", [None, [513.0, 513.0, 7.0, 1.0, 1.0, 1.0, 2.0, 2.0]], ids=["mean", "weighted"])
@on_ranks(2)
def test_losses_of_low_precision_or_of_one_element_are_averaged_in_float32(mesh: fs.Mesh, weights: Any, dtype: Any) -> None:
    batch = torch.tensor(LOW) if weights is None else (torch.tensor(LOW), torch.tensor(weights))
    one_element = lambda loss: loss.to(dtype).view(1, 1)  # noqa: E731
    metrics = losses(mesh, batch, one_element, accumulate=8, weighted=weights is not None)
    assert metrics == (pytest.approx(weighted_mean(LOW, weights or [1.0] * 8), rel=2e-7, abs=0),) * 2


@on_ranks(2)
def test_it_costs_no_collective(mesh: fs.Mesh) -> None:
    with fs.record_events() as events:
        losses(mesh, torch.ones(2))
    # The last one is of the mean loss.
    assert [event.kind for event in events] == ["all_gather", "reduce_scatter", "all_reduce"]
