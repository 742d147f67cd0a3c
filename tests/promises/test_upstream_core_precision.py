"""PyTorch's nested model in float16: one step equals that of the model in half precision, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import funcshard as fs
from tests.promises.test_upstream_core import CPU, FP16, PREFETCH, STRATEGIES, sharded_by, theirs
from tests.ranks import run_ranks

NAME = "NestedWrappedModule"


def one_step(mesh: fs.Mesh) -> tuple[dict[Any, Any], Any, Any]:
    """Return loss, gradient dtypes and parameters after one step in each way; the reference's; and its first params."""
    runs = {}
    for strategy in STRATEGIES:
        for backward, forward in PREFETCH:
            for offload in (False, True):
                way = (strategy, backward, forward, offload)
                module, sharded, params, buffers = sharded_by(NAME, mesh, *way, precision=FP16)
                batch, shards = module.get_input(CPU), fs.shard(params, sharded.plan, mesh)
                loss_fn = lambda s: module.get_loss(batch, sharded(s, buffers, *batch))  # noqa: E731, B023
                with fs.record_events() as events:
                    loss, grads = fs.value_and_grad(loss_fn)(shards)
                assert {event.dtype for event in events} == {"float16"}
                optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.01)
                new, _ = optimizer.step(grads, optimizer.init(shards), shards)
                dtypes = {grad.dtype for unit in grads.values() for grad in unit.values()}
                runs[way] = (loss, dtypes, fs.gather(new, sharded.plan, mesh))
    module = theirs(NAME, mesh.rank, mesh.world_size, dist.group.WORLD)
    start = {key: value.detach().clone() for key, value in module.named_parameters()}
    low = copy.deepcopy(module).half()
    (x,) = module.get_input(CPU)
    reference_loss = module.get_loss((x,), low(x.half()))
    reference_loss.backward()
    sgd = torch.optim.SGD(module.parameters(), lr=0.01)
    for value, lower in zip(module.parameters(), low.parameters(), strict=True):
        dist.all_reduce(lower.grad)
        value.grad = lower.grad.float() / mesh.world_size
    sgd.step()
    return runs, (reference_loss.detach(), dict(module.named_parameters())), start


@pytest.mark.slow
def test_one_step_in_float16_equals_that_of_the_halved_model_to_the_bit():
    for runs, (expected_loss, expected), start in run_ranks(one_step, 2, timeout=120):
        assert len(runs) == 36
        for way, (loss, dtypes, params) in runs.items():
            assert loss.dtype == torch.float16, way
            assert torch.equal(loss, expected_loss), way
            assert dtypes == {torch.float32}, way
            assert [key for key, value in expected.items() if not torch.equal(params[key], value)] == [], way
            assert not any(torch.equal(params[key], value) for key, value in start.items())
