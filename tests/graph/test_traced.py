"""A traced step gives the bits and the collectives of the step, whatever the step does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchopt
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import funcshard as fs
from funcshard.graph.step_graph import StepGraph, collective_of, starts_and_waits
from tests.graph import linear
from tests.graph.linear import same
from tests.ranks import on_ranks, run_ranks

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
BFLOAT16 = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLOAT16 = fs.MixedPrecision(param_dtype=torch.float16)
STEPS = 5


class Net(nn.Module):
    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout)) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


def made(
    mesh: fs.Mesh,
    *,
    plan: dict[str, Any] | None = None,
    remat: tuple[str, ...] = (),
    dropout: float = 0.0,
    mutable: bool = False,
    weighted: bool = False,
    optimizer: Callable[[fs.Plan, fs.Mesh], Any] = lambda plan, mesh: fs.torch_optimizer(SGD, lr=0.1, momentum=0.9),
    **options: Any,
) -> tuple[Any, fs.TrainState]:
    torch.manual_seed(0)
    apply, params, buffers = fs.make_functional(Net(dropout, mutable), mutable=mutable)
    cut = fs.make_plan(params, mesh, units=["embed", "blocks.*"], **(plan or {}))
    sharded = fs.fully_shard(apply, cut, mesh, remat=remat)

    def loss_fn(shards: Any, buffers: Any, batch: torch.Tensor) -> Any:
        out = sharded(shards, buffers, batch)
        out, new = out if mutable else (out, None)
        loss = F.cross_entropy(out, batch.flatten())
        return (loss, *[batch.shape[0]] * weighted, *[new] * mutable) if weighted or mutable else loss

    step = fs.make_train_step(loss_fn, optimizer(cut, mesh), cut, mesh, weighted=weighted, mutable=mutable, **options)
    return step, step.init(fs.shard(params, cut, mesh), buffers)


def batch_of(mesh: fs.Mesh, step: int, size: int = 4) -> torch.Tensor:
    return torch.randint(0, 16, (size, 6), generator=torch.Generator().manual_seed(100 * mesh.rank + step))


def steps(mesh: fs.Mesh, take: Any, state: Any, sizes: Sequence[int] = (4,) * STEPS) -> tuple[Any, Any, Any]:
    return steps_on([batch_of(mesh, number, size) for number, size in enumerate(sizes)], take, state)


def steps_on(batches: list[Any], take: Any, state: Any) -> tuple[Any, Any, Any]:
    """Return what steps on some batches give: metrics, the last state, and the collectives of each step."""
    torch.manual_seed(5)
    metrics, events = [], []
    for batch in batches:
        with fs.record_events() as seen:
            state, found = take(state, batch)
        metrics.append(fs.copy(found))
        events.append(seen)
    return metrics, fs.copy(state), events


def torch_optimizer(cls: Any, **options: Any) -> Callable[[fs.Plan, fs.Mesh], Any]:
    return lambda plan, mesh: fs.torch_optimizer(cls, **options)


def grouped(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    groups = [{"paths": ["**.bias"], "weight_decay": 0.0}]
    return fs.torch_optimizer(ADAMW, lr=lambda step: 1e-2 / (1 + step), groups=groups, plan=plan, mesh=mesh)


HYBRID = {"replicate": 2, "shard": 2}
# Why not AdamW where the optimizer is not the point: its operations are most of a recording, and a
# first step, which makes a state, is recorded for itself.
PLAIN = torch_optimizer(SGD, lr=0.1)
# What ``Job`` has no option for; promises/test_jobs.py traces all that it has.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "slices": (4, {"plan": {"reshard_after_forward": 2}, "optimizer": PLAIN}),  # it sees the most, so it runs by day
    "shard_grad_op, groups": (2, {"plan": {"strategy": "shard_grad_op"}, "optimizer": grouped}),
    "no_shard, torchopt": (2, {"plan": {"strategy": "no_shard"}, "optimizer": lambda plan, mesh: torchopt.adam(1e-2)}),
    "bfloat16, fused": (2, {
        "plan": {"precision": BFLOAT16},
        "optimizer": torch_optimizer(ADAMW, lr=lambda step: 1e-2 / (1 + step), fused=True),
    }),
    "offload, foreach, not donated": (2, {
        "plan": {"offload": True}, "donate": False, "optimizer": torch_optimizer(ADAMW, lr=1e-2, foreach=True),
    }),
    "scaler, skipped steps": (2, {
        "scaler": fs.GradScaler(2.0**24, 2.0, 2.0**-6), "plan": {"precision": FLOAT16},
    }),
    "remat, dropout": (2, {"remat": ("blocks.0", "blocks.1"), "dropout": 0.5, "optimizer": PLAIN}),
    "shard_grad_op, muon, clipped, weights": (2, {
        "plan": {"strategy": "shard_grad_op"}, "max_norm": 1.0, "weighted": True,
        "optimizer": lambda plan, mesh: fs.muon(plan=plan, mesh=mesh, lr=lambda step: 1e-2 / (1 + step)),
    }),
    "micro-batches, reduced once": (2, {
        "accumulate": 2, "reduce": "once",
        "optimizer": torch_optimizer(SGD, lr=lambda step: math.cos(step / 10), momentum=0.9),
    }),
    "weights, scaler, mutable": (2, {"weighted": True, "mutable": True, "scaler": fs.GradScaler(), "optimizer": PLAIN}),
}  # fmt: skip

# The cases whose work itself differs between ranks, with the reason.
RANKS_DIFFER = {
    "shard_grad_op, groups": "a shard has its own ranges of each group, so a rank has other operations",
    "shard_grad_op, muon, clipped, weights": "each rank orthogonalises the matrices that it owns",
}

# The cases that are saved and loaded too: rank 0 writes the graph, and all ranks run it.
LOADED = (
    "slices", "remat, dropout", "shard_grad_op, muon, clipped, weights", "scaler, skipped steps", "weights, scaler, mutable",
)  # fmt: skip


@pytest.mark.nightly(one_in=5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:ignored_classes of the precision hold")
def test_a_traced_step_has_the_bits_and_the_collectives_of_the_step(case: str, tmp_path: Path) -> None:
    ranks, options = CASES[case]

    def main(mesh: fs.Mesh) -> tuple[str, str]:
        eager = steps(mesh, *made(mesh, **options))
        own, state = made(mesh, **options)
        step = fs.trace(own, state, batch_of(mesh, 0))
        assert same(steps(mesh, step, state), eager)
        if case == "scaler, skipped steps":
            assert Counter(bool(metrics["found_inf"]) for metrics in eager[0]) == {True: 2, False: 3}
        assert list(step.events) == eager[2][-1]
        waits = [waits for _, waits in starts_and_waits(step.graph.graph)]
        assert all(len(each) == 1 for each in waits), "a collective is waited for once"
        if case in LOADED:
            step.save(tmp_path / "step.json")
            own, state = made(mesh, **options)
            loaded = fs.load_traced(tmp_path / "step.json", mesh, step=own)
            assert same(steps(mesh, loaded, state), eager)
            assert (str(loaded), loaded.fingerprint(), loaded.memory()) == (str(step), step.fingerprint(), step.memory())
        return str(step), step.fingerprint()

    texts, fingerprints = zip(*fs.simulate(main, ranks), strict=True)
    equal = case not in RANKS_DIFFER
    assert (len(set(texts)) == 1) == (len(set(fingerprints)) == 1) == equal, "the graph is the same on every rank"


@pytest.mark.slow
def test_many_recordings_end_in_a_warning() -> None:
    step, state = linear.made(fs.Mesh(), donate=False)
    traced = fs.trace(step, state, torch.ones(9, 3))
    with pytest.warns(UserWarning, match="recorded for 8 kinds of arguments.*dynamic_shapes"):
        _ = [traced(state, torch.ones(size, 3)) for size in range(1, 9)]


def test_a_number_of_python_in_the_state_is_a_constant_and_changes_make_recordings() -> None:
    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates = torch.utils._pytree.tree_map(lambda grad: -state["rate"] * grad, grads)
        return updates, {"rate": state["rate"] / 2}

    step, state = linear.made(fs.Mesh(), optimizer=(lambda params: {"rate": 0.5}, update))
    traced, other = fs.trace(step, state, linear.BATCH), state
    for _ in range(3):
        (state, metrics), (other, expected) = traced(state, linear.BATCH), step(other, linear.BATCH)
        assert same((state, metrics), (other, expected))
    assert state.opt_state == {"rate": 0.5 / 2**3}


def test_the_old_state_is_donated_as_by_the_step() -> None:
    step, state = linear.made(fs.Mesh(), momentum=0.9)
    traced = fs.trace(step, state, linear.BATCH)
    assert torch.isfinite(state.shards[""]["float32"]).all(), "trace only looks at the state"
    for _ in range(2):
        old, (state, _) = state, traced(state, linear.BATCH)
        with pytest.raises(RuntimeError, match="donated to a training step"):
            old.shards[""]["float32"] + 1
        with pytest.raises(RuntimeError, match="donated to a step"):
            step(old._replace(shards=state.shards), linear.BATCH)


def test_a_forward_derivative_that_torch_cannot_record_is_named_as_the_cause() -> None:
    module, loss = nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4)), lambda f, x: torch.func.jvp(f, (x,), (x,))[1].mean()
    with pytest.raises(ValueError, match=r"cannot record this torch.func.jvp: .* as for GroupNorm"):
        fs.trace(*linear.made(fs.Mesh(), loss, module=module), torch.randn(2, 3))


def weighted_by_a_pair(f: Any, x: torch.Tensor) -> torch.Tensor:
    weights: torch.Tensor = (TwoTensor(x, x.clone()) * 2).a.sum(1)
    return (f(x).square().mean(1) * weights).mean()


def test_a_tensor_that_consists_of_tensors_is_recorded_inside_a_step() -> None:  # as torchao's of float8
    step, state = linear.made(fs.Mesh(), weighted_by_a_pair)
    traced = fs.trace(step, state, linear.BATCH)
    assert same(traced(fs.copy(state), linear.BATCH), step(state, linear.BATCH))


def test_a_number_that_code_keeps_between_recordings_is_an_error_of_ours() -> None:
    counts = Counter[str]()

    def counting(f: Any, x: torch.Tensor) -> torch.Tensor:
        counts["large"] += (x > 1).sum().item()  # type: ignore[assignment]
        return linear.squares(f, x)

    with pytest.raises(RuntimeError, match=r"cannot follow Python code .* such code in test_traced.py"):
        fs.trace(*linear.made(fs.Mesh(), counting, momentum=0.9), linear.BATCH)


def of_a_total(f: Any, x: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = f(x)
    total = outputs.detach().clone()
    torch.distributed.all_reduce(total)
    return (outputs * total).mean()


def tracing_of_a_total(mesh: fs.Mesh) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)  # as linear's own was made when each process imported it
    with pytest.raises(RuntimeError, match=r"cannot record c10d.allreduce_.default, .* call fs.psum"):
        fs.trace(*linear.made(mesh, of_a_total, module=module), linear.BATCH)


def test_a_collective_of_torch_is_an_error_as_a_graph_would_lose_it() -> None:
    run_ranks(tracing_of_a_total, 2)


def returning_the_data_of_its_all_reduce(step_graph: StepGraph) -> StepGraph:
    """Return a graph whose local loss is the copy that the all-reduce of the loss reads."""
    new = step_graph.copy()
    start = next(node for node in new.graph.nodes if collective_of(node) == "all_reduce")
    (data,) = start.all_input_nodes
    output = new.graph.output_node()
    *_, local_loss, _loss = output.all_input_nodes
    output.replace_input_with(local_loss, data)
    return new


@on_ranks(2)
def test_a_collective_does_not_overwrite_data_that_is_read_later(mesh: fs.Mesh) -> None:
    step, state = linear.made(mesh)
    batch = linear.BATCH + mesh.rank
    changed = fs.trace(step, state, batch).changed(returning_the_data_of_its_all_reduce)
    _, found = changed(fs.copy(state), batch)
    _, expected = step(state, batch)
    assert found["local_loss"].equal(expected["local_loss"])
    assert not found["local_loss"].equal(found["loss"]), "batches of ranks differ"
