"""Parameter groups on flat shards equal parameter groups on the whole model."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import funcshard as fs
from funcshard._utils import tree
from funcshard.train.param_groups import ParamGroupLayout, group_leaves, trainable_buffers
from tests.ranks import run_ranks, run_simulated

O = torch.optim  # noqa: E741
NO_DECAY = {"paths": ["**.bias", "**.norm*"], "weight_decay": 0.0}
FAST = {"paths": ["head.weight"], "lr": 0.3}
CASES: dict[str, tuple[Any, dict[str, Any], list[dict[str, Any]]]] = {
    "AdamW": (O.AdamW, {"lr": 0.1, "weight_decay": 0.1}, [NO_DECAY, FAST]),
    "AdamW fused": (O.AdamW, {"lr": 0.1, "weight_decay": 0.1, "fused": True}, [NO_DECAY, FAST]),
    "AdamW foreach": (O.AdamW, {"lr": 0.1, "weight_decay": 0.1, "foreach": True}, [NO_DECAY]),
    "Adam amsgrad": (O.Adam, {"lr": 0.1, "amsgrad": True}, [FAST]),
    "SGD": (O.SGD, {"lr": 0.1, "weight_decay": 0.1}, [NO_DECAY]),
    "SGD momentum of one group": (O.SGD, {"lr": 0.1, "momentum": 0.9}, [{"paths": ["head"], "momentum": 0.0}]),
    "NAdam": (O.NAdam, {"lr": 0.1, "betas": (0.8, 0.9)}, [{"paths": ["head"], "betas": (0.5, 0.6)}]),
    "ASGD": (O.ASGD, {"lr": 0.1, "t0": 2.0}, [{"paths": ["head"], "lr": 0.02}]),
    "Rprop": (O.Rprop, {"lr": 0.1}, [FAST]),
}
WORLDS = [{"shard": 1}, {"shard": 2}, {"shard": 3}, {"shard": 4}, {"replicate": 2, "shard": 2}]


def example(seed: int = 0) -> dict[str, torch.Tensor]:
    # Every range has a multiple of 32 elements, so that kernels take the same vector instructions
    # for all of them.
    shapes: dict[str, tuple[int, ...]] = {"head.bias": (64,), "head.weight": (64, 65)}
    for i in range(2):
        names = {"bias": (64,), "norm1": (64,), "mid.weight": (64, 64)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in names.items()}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def on_the_whole(cls: Any, options: dict, groups: list[dict], steps: int = 4) -> dict[str, torch.Tensor]:
    params = {name: torch.nn.Parameter(value) for name, value in example().items()}
    plan = fs.make_plan(example(), 1)
    group_of, more = group_leaves(plan, groups)
    members = [[params[name] for name in params if group_of[name] == number] for number in range(len(more))]
    optimizer = cls([{"params": own, **each} for own, each in zip(members, more, strict=True)], **options)
    for step in range(steps):
        for name, grad in example(100 + step).items():
            params[name].grad = grad
        optimizer.step()
    return {name: value.detach() for name, value in params.items()}


def on_shards(mesh: fs.Mesh, case: str, strategy: str = "full_shard", steps: int = 4) -> dict[str, torch.Tensor]:
    cls, options, groups = CASES[case]
    plan = fs.make_plan(example(), mesh, units=["blocks.*"], strategy=strategy)
    optimizer = fs.torch_optimizer(cls, groups=groups, plan=plan, mesh=mesh, **options)
    shards = fs.shard(example(), plan, mesh)
    state = optimizer.init(shards)
    structures = set()
    for step in range(steps):
        with fs.record_events() as events:
            shards, state = optimizer.step(fs.shard(example(100 + step), plan, mesh), state, shards)
        assert events == []
        structures.add(str(tree.map(lambda leaf: 0, state)))
    assert len(structures) == 1
    return fs.gather(shards, plan, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_groups_on_shards_are_parameter_groups_on_the_whole(case: str, world: Any) -> None:
    expected = on_the_whole(*CASES[case])
    plain = on_the_whole(*CASES[case][:2], [])
    assert not all(torch.equal(expected[name], plain[name]) for name in plain)  # the groups matter
    for params in run_simulated(on_shards, math.prod(world.values()), case, shape=world):
        for name, value in params.items():
            assert torch.equal(value, expected[name]), name


def test_groups_on_processes_and_unsharded() -> None:
    expected = on_the_whole(*CASES["AdamW"])
    for params in run_ranks(on_shards, 2, "AdamW") + run_simulated(on_shards, 2, "AdamW", "no_shard"):
        assert all(torch.equal(params[name], expected[name]) for name in expected)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_each_group_is_one_kernel_and_updates_in_place() -> None:
    plan, mesh = fs.make_plan(example(), 1, units=["blocks.*"]), fs.Mesh()
    cls, options, groups = CASES["AdamW fused"]
    optimizer = fs.torch_optimizer(cls, groups=groups, plan=plan, mesh=mesh, **options)
    shards = fs.shard(example(), plan, mesh)
    shards, state = optimizer.step(fs.shard(example(100), plan, mesh), optimizer.init(shards), shards)
    before = [leaf.data_ptr() for leaf in tree.leaves((shards, state)) if isinstance(leaf, torch.Tensor)]
    assert all(
        own["exp_avg"].shape == shards[unit]["float32"].shape
        for unit, each in state["leaves"].items()
        for own in each.values()
    )
    with Calls() as calls:
        shards, state = optimizer.step(fs.shard(example(101), plan, mesh), state, shards)
    assert calls.names.count("aten::_fused_adamw_") == 3
    assert [leaf.data_ptr() for leaf in tree.leaves((shards, state)) if isinstance(leaf, torch.Tensor)] == before


def test_an_option_of_a_group_may_be_a_schedule() -> None:
    plan, mesh = fs.make_plan({"a": torch.ones(2), "b": torch.ones(2)}, 1), fs.Mesh()
    groups = [{"paths": ["b"], "lr": lambda step: 0.5 * step}]
    optimizer = fs.torch_optimizer(O.SGD, lr=1.0, groups=groups, plan=plan, mesh=mesh)
    shards, grads = {"": {"float32": torch.zeros(4)}}, {"": {"float32": torch.ones(4)}}
    state = optimizer.init(shards)
    for wanted in ([-1, -1, 0, 0], [-2, -2, -0.5, -0.5]):
        shards, state = optimizer.step(grads, state, shards)
        assert shards[""]["float32"].tolist() == wanted


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
