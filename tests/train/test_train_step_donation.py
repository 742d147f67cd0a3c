"""A step donates its state: nothing can use the old one, unless it was copied or not donated."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import of_module, same_bits
from tests.ranks import on_ranks

X = torch.linspace(-1, 1, 24).reshape(8, 3)


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
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plan, sharded, shards = of_module(mesh, net, ["0", "2"])
    optimizer = OPTIMIZERS[name](plan, mesh)
    loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, **options)
    return Case(step.init(shards, {}), step, sharded, plan, mesh, optimizer, folder)


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
