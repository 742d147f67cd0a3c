"""Parameter groups on flat shards are ranges: their updates are views, and they cover each shard once."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import funcshard as fs
from funcshard._utils import tree
from funcshard.plan import trainable_buffers
from funcshard.train.param_groups import ParamGroupLayout, group_leaves
from tests.train.test_optimizers import OPTIMIZERS, example


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_each_group_is_one_kernel_and_updates_in_place() -> None:
    plan, mesh = fs.make_plan(example(), 1, units=["blocks.*"]), fs.Mesh()
    cls, options, groups = OPTIMIZERS["AdamW fused in groups"]
    optimizer = fs.torch_optimizer(cls, groups=groups, plan=plan, mesh=mesh, **options)
    shards = fs.shard(example(), plan, mesh)
    shards, state = optimizer.step(fs.shard(example(100), plan, mesh), optimizer.init(shards), shards)
    before = [leaf.data_ptr() for leaf in tree.leaves((shards, state)) if isinstance(leaf, torch.Tensor)]
    for unit, leaves in state["leaves"].items():
        assert {own["exp_avg"].shape for own in leaves.values()} == {shards[unit]["float32"].shape}
    with Calls() as calls:
        shards, state = optimizer.step(fs.shard(example(101), plan, mesh), state, shards)
    assert calls.names.count("aten::_fused_adamw_") == 3
    assert [leaf.data_ptr() for leaf in tree.leaves((shards, state)) if isinstance(leaf, torch.Tensor)] == before


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_ranges_cover_each_shard_once_and_pick_and_spread_are_inverse(ranks: int) -> None:
    params = {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(0), "d": torch.ones(6), "e": torch.ones(5)}
    plan = fs.make_plan(params, ranks)
    ((_, buffer),) = trainable_buffers(plan)
    everywhere = dict(zip(params, [0, 1, 1, 1, 0], strict=True))
    for left_out in ([], ["a"], ["b", "d"], ["e"], list(params)):
        group_of = {path: group for path, group in everywhere.items() if path not in left_out}
        seen = torch.full((ranks, buffer.shard_numel), -1)
        for rank in range(ranks):
            layout = ParamGroupLayout(group_of, 2, rank)
            for each in layout.ranges(buffer):
                assert each.start < each.stop
                assert (seen[rank, each.start : each.stop] == -1).all()
                seen[rank, each.start : each.stop] = each.group
            flat = torch.arange(1, buffer.shard_numel + 1)
            again = layout.spread(layout.pick(flat, buffer), buffer)
            assert torch.equal(again, flat * (seen[rank] >= 0))
        wanted = [group_of.get(leaf.path, -1) for leaf in buffer.leaves for _ in range(leaf.numel)]
        assert seen.flatten().tolist()[: buffer.numel] == wanted
        assert set(seen.flatten().tolist()[buffer.numel :]) <= {wanted[-1]}


def test_frozen_leaves_are_in_no_group() -> None:
    params = {"a.w": torch.ones(2), "a.b": torch.ones(3, requires_grad=True)}
    group_of, _ = group_leaves(fs.make_plan(params, 1), [{"paths": ["a"]}])
    assert group_of == {"a.b": 1}
