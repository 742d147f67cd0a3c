"""Passes: pure functions from a traced step to a traced step, as ``fs.passes``.

In reading order; ``traced.applied`` changes each recording, and checks the result:

- ``keeping``: ``keep_gathered``. ``updating``: ``update_early``.
- ``moving``: ``gather_earlier`` and ``wait_later``, and the memory while operations move.

Example:
    >>> import torch, funcshard as fs
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    >>> apply, params, buffers = fs.make_functional(net)
    >>> def main(mesh):
    ...     plan = fs.make_plan(params, mesh, units=["0", "1"])
    ...     sharded = fs.fully_shard(apply, plan, mesh)
    ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
    ...     optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
    ...     step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
    ...     state = step.init(fs.shard(params, plan, mesh), buffers)
    ...     traced = fs.trace(step, state, torch.ones(2, 3))
    ...     kept = fs.passes.keep_gathered(traced, budget="1MiB")
    ...     return [len(step.events) for step in (traced, kept)]
    >>> fs.simulate(main, world_size=2)[0]
    [6, 5]
"""

from __future__ import annotations

from funcshard.graph.passes.keeping import keep_gathered
from funcshard.graph.passes.moving import gather_earlier, wait_later
from funcshard.graph.passes.updating import update_early

__all__ = ["gather_earlier", "keep_gathered", "update_early", "wait_later"]
