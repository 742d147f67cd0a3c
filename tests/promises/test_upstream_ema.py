"""PyTorch's training with averaged parameters: the average is a tree of shards, and is never gathered."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import run_simulated

WIDTH, DECAY, ROUNDS = 16, 0.5, 3
STRATEGIES = ("shard_grad_op", "full_shard", "no_shard")
average = get_ema_multi_avg_fn(DECAY)


def transformer() -> nn.Transformer:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that nested tensors need batch_first
        return nn.Transformer(WIDTH, 2, 1, 1, dim_feedforward=8, dropout=0.0)


def inputs(seed: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, batch, WIDTH, generator=generator), torch.randn(5, batch, WIDTH, generator=generator)


def in_plain_torch(dtype: torch.dtype, ranks: int, rank: int) -> list[torch.Tensor]:
    """Return the outputs of one copy of the model after each round, computed with its averaged parameters."""
    net = transformer()
    params = dict(net.named_parameters())
    ema = {name: value.detach().clone() for name, value in params.items()}
    adam = torch.optim.Adam(params.values(), lr=1e-2)

    def run(values: Any, *given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, values, tuple(x.to(dtype) for x in given))

    outs = []
    for round_ in range(ROUNDS):
        net.train()
        sums: list[torch.Tensor] = []
        for other in range(ranks):
            local = {name: value.detach().to(dtype).requires_grad_() for name, value in params.items()}
            grads = torch.autograd.grad(run(local, *inputs(10 * round_ + other, 2)).sum(), local.values())
            sums = list(grads) if other == 0 else [a + b for a, b in zip(sums, grads, strict=True)]
        for value, grad in zip(params.values(), sums, strict=True):
            value.grad = grad.float() / ranks
        adam.step()
        with torch.no_grad():
            average(list(ema.values()), list(params.values()), None)
            net.eval()
            outs.append(run({name: value.to(dtype) for name, value in ema.items()}, *inputs(100 + rank, 1)))
    return outs


def train_average_evaluate(mesh: fs.Mesh, strategy: str, dtype: torch.dtype) -> None:
    net = transformer()
    apply, params, buffers = fs.make_functional(net)
    units = fs.wrap.by_class(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)(net)
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy, precision=fs.MixedPrecision(dtype))
    trained, evaluated = fs.fully_shard(apply.train(), plan, mesh), fs.fully_shard(apply.eval(), plan, mesh)
    optimizer = fs.torch_optimizer(torch.optim.Adam, lr=1e-2)
    step = fs.make_train_step(lambda s, b, x: trained(s, b, *x).sum(), optimizer, plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    ema = tree.map(torch.clone, state.shards)
    outs = []
    for round_ in range(ROUNDS):
        state, _ = step(state, inputs(10 * round_ + mesh.rank, 2))
        with torch.no_grad():
            with fs.record_events() as events:
                average(tree.leaves(ema), tree.leaves(state.shards), None)
            assert events == []
            with fs.record_events() as events:
                outs.append(evaluated(ema, buffers, *inputs(100 + mesh.rank, 1)))
        assert {event.dtype for event in events} <= {str(dtype).removeprefix("torch.")}
    expected = in_plain_torch(dtype, mesh.world_size, mesh.rank)
    assert {out.dtype for out in outs} == {dtype}
    assert [torch.equal(out, wanted) for out, wanted in zip(outs, expected, strict=True)] == [True] * ROUNDS
    assert not any(torch.equal(outs[i], outs[j]) for i in range(ROUNDS) for j in range(i))
    assert not torch.equal(outs[-1], evaluated(state.shards, buffers, *inputs(100 + mesh.rank, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_uses_the_average_which_moves_every_round(strategy, dtype):
    run_simulated(train_average_evaluate, 2, strategy, dtype)
