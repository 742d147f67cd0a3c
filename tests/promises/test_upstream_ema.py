"""PyTorch's training with averaged parameters: the average is a tree of shards, and is never gathered."""

from __future__ import annotations

import warnings

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


def train_average_evaluate(mesh: fs.Mesh, strategy: str, dtype: torch.dtype) -> None:
    """Compare the average of shards with that of whole parameters, and what the model computes with it."""
    net = transformer()
    apply, params, buffers = fs.make_functional(net)
    units = fs.wrap.by_class(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)(net)
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy, precision=fs.MixedPrecision(dtype))
    trained, evaluated = fs.fully_shard(apply.train(), plan, mesh), fs.fully_shard(apply.eval(), plan, mesh)
    optimizer = fs.torch_optimizer(torch.optim.Adam, lr=1e-2)
    step = fs.make_train_step(lambda s, b, x: trained(s, b, *x).sum(), optimizer, plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    ema, whole = tree.map(torch.clone, state.shards), {name: p.detach().clone() for name, p in params.items()}
    outs, held_out = [], inputs(100 + mesh.rank, 1)
    for round_ in range(ROUNDS):
        state, _ = step(state, inputs(10 * round_ + mesh.rank, 2))
        gathered = fs.gather(state.shards, plan, mesh)
        with torch.no_grad():
            with fs.record_events() as events:
                average(tree.leaves(ema), tree.leaves(state.shards), None)
            assert events == []
            with fs.record_events() as events:
                outs.append(evaluated(ema, buffers, *held_out))
            assert {event.dtype for event in events} <= {str(dtype).removeprefix("torch.")}
            average([whole[name] for name in gathered], list(gathered.values()), None)
            low = {name: value.to(dtype) for name, value in whole.items()}
            wanted = torch.func.functional_call(net.eval(), low, tuple(x.to(dtype) for x in held_out))
        assert outs[-1].dtype == dtype
        assert torch.equal(outs[-1], wanted)
        assert all(torch.equal(value, whole[name]) for name, value in fs.gather(ema, plan, mesh).items())
    assert not any(torch.equal(outs[i], outs[j]) for i in range(ROUNDS) for j in range(i))
    assert not torch.equal(outs[-1], evaluated(state.shards, buffers, *held_out))


@pytest.mark.nightly(one_in=4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_uses_the_average_which_moves_every_round(strategy, dtype):
    run_simulated(train_average_evaluate, 2, strategy, dtype)
