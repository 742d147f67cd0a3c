"""Initialisation unit by unit: the whole module's values, with one unit's parameters in memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.module.law import same_bits
from tests.ranks import on_ranks
from tests.storages import Log

WORLDS = [1, 3, {"replicate": 2, "shard": 2}]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)  # its reset writes parameters of a module inside it
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.zeros(3))
        self.norm.weight.requires_grad_(False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)


class Data(nn.Linear):
    def reset_parameters(self) -> None:
        self.weight.data.normal_()
        self.bias = nn.Parameter(torch.ones(self.out_features))


def reset(module: nn.Module) -> None:
    function = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if function:
        function()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


MODULES = {
    "blocks and ties": (Net, ["blocks.*"]),
    "nested": (Net, ["blocks.*", "blocks.*.attention"]),
    "no units": (Net, []),
    "through data and by assignment": (lambda: nn.Sequential(Data(3, 4), Data(4, 2)), ["*"]),
    "a transformer as one unit": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), []),
    "one module twice": (lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2, nn.Linear(3, 1)), ["0"]),
}


@pytest.mark.nightly(one_in=4)
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("case", MODULES)
@on_ranks()
def test_the_values_are_those_of_the_whole_module(mesh: fs.Mesh, case: str, world: Any) -> None:
    build, units = MODULES[case]
    whole, net = build(), on_meta(build)
    with torch.no_grad():
        torch.manual_seed(7)
        whole.apply(reset)
    torch.manual_seed(7)
    plan = fs.make_plan(fs.make_functional(net)[1], mesh, units=units)
    shards, buffers = fs.init_module(net, plan, mesh)
    same_bits({**fs.gather(shards, plan, mesh)}, {name: value.detach() for name, value in whole.named_parameters()})
    same_bits(buffers, dict(whole.named_buffers()))
    assert all(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))


@on_ranks(2)
def test_of_a_module_only_one_units_parameters_exist_at_a_time(mesh: fs.Mesh) -> None:
    net = on_meta(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(5)]))
    _, params, _ = fs.make_functional(net)
    log, moments = Log(), []

    def watched(module: nn.Module) -> None:
        reset(module)
        for parameter in module.parameters():
            if type(parameter) is nn.Parameter:
                log(parameter)
        moments.append(len({ref.cdata for ref in log if not ref.expired()}))

    fs.init_module(net, fs.make_plan(params, mesh, units=["*"]), mesh, reset=watched)
    assert max(moments) == 4
    assert log.alive() == 0


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks({"replicate": 2, "shard": 2})
def test_a_function_is_asked_for_each_unit_in_plan_order_and_its_values_are_freed(mesh: fs.Mesh, strategy: str) -> None:
    params = {"a": torch.empty(5, device="meta"), "b": [torch.empty(2, 3, device="meta"), torch.empty((), device="meta")]}
    asked, log = [], Log()

    def init(unit: Any) -> dict[str, torch.Tensor]:
        asked.append((unit.name, log.alive()))
        values = {leaf.path: torch.randn(leaf.shape) for leaf in unit.leaves}
        for value in values.values():
            log(value)
        return values

    plan = fs.make_plan(params, mesh, units=["b"], strategy=strategy)
    torch.manual_seed(1)
    gathered = fs.gather(fs.init_shards(init, plan, mesh), plan, mesh)
    assert asked == [("", 0), ("b", 0)]
    torch.manual_seed(1)
    expected = [torch.randn(5), torch.randn(2, 3), torch.randn(())]
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(gathered), expected, strict=True))


def test_buffers_with_values_are_kept_unless_a_reset_writes_them() -> None:
    net = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    net.register_buffer("angles", torch.arange(3.0))
    net[1].running_mean = torch.full((2,), 5.0)
    _, params, _ = fs.make_functional(net)
    _, buffers = fs.init_module(net, fs.make_plan(params, 1), fs.Mesh())
    assert buffers["angles"].tolist() == [0.0, 1.0, 2.0]
    assert buffers["1.running_mean"].tolist() == [0.0, 0.0]
    assert net[1].running_mean.tolist() == [5.0, 5.0]
    buffers["angles"].zero_()
    assert net.angles.tolist() == [0.0, 1.0, 2.0]


class Reaches(nn.Sequential):
    def __init__(self, how: Callable[[nn.Module], object]) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        self.how = how

    def reset_parameters(self) -> None:
        self.how(self)


class Partly(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight[0])


class Scaled(nn.Linear):
    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.mul_(2)


def with_buffer(dtype: torch.dtype) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.zeros(3, dtype=dtype))
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no reset": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.ParameterList([nn.Parameter(torch.zeros(2))])),
        r"must be written by the reset of a module that holds it; no reset wrote \['1.0'\]: pass reset=function",
    ),
    "a buffer": (lambda: with_buffer(torch.float32), r"no reset wrote \['table'\]: pass reset=function, .* or give buffers"),
    "a buffer of integers": (lambda: with_buffer(torch.int64), r"no reset wrote \['table'\]"),
    "changed": (lambda: Scaled(2, 2, bias=False), r"no reset wrote \['weight'\]|'weight' still has elements that"),
    "in part": (lambda: Partly(2, 2), "'weight' still has elements that its module's reset did not write"),
    "reads another unit": (lambda: Reaches(lambda m: m[0].weight.sum()), "'0.weight' was read .*unit '0'"),
    "writes another unit": (lambda: Reaches(lambda m: nn.init.ones_(m[1].bias)), "only parameters of its own unit exist"),
    "through data": (lambda: Reaches(lambda m: m[1].bias.data.zero_()), r"while module '\(root\)' \(Reaches\) was reset"),
}


@pytest.mark.parametrize("draws", ["whole", "blocks"])
@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED)
def test_a_reset_that_leaves_garbage_is_refused(build: Callable[[], nn.Module], words: str, draws: str) -> None:
    net = on_meta(build)
    _, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, 1, units=["*"] if isinstance(net, Reaches) else [])
    with pytest.raises(ValueError, match=rf"(?s){words}"):
        fs.init_module(net, plan, fs.Mesh(), draws=draws)


def test_infinite_values_count_as_written() -> None:
    # Their sum is NaN, as that of a parameter that was written in part.
    net = on_meta(lambda: nn.Linear(2, 1, bias=False))
    plan = fs.make_plan(fs.make_functional(net)[1], 1)
    values = torch.tensor([[math.inf, -math.inf]])
    shards, _ = fs.init_module(net, plan, fs.Mesh(), reset=lambda m: m.weight.copy_(values))
    assert torch.equal(shards[""]["float32"], values.view(-1))


@on_ranks({"replicate": 2, "shard": 2})
def test_ranks_that_make_different_values_get_an_error(mesh: fs.Mesh) -> None:
    words = r"must have the same values on every rank; found 2 different ones, on ranks 0, 1; ranks 2, 3 \({} of \d leaves"
    net = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    numpys = torch.full((2,), float(mesh.rank // 2))  # as numpy's generator would give, seeded by rank
    init = lambda unit: {leaf.path: numpys if leaf.path == "b" else torch.randn(2) for leaf in unit.leaves}  # noqa: E731
    with pytest.raises(ValueError, match=rf"leaf 'b' of init\(unit\) {words.format(1)} differ\): draw random numbers from"):
        fs.init_shards(init, fs.make_plan(params, mesh, units=["b"]), mesh)
    own = fs.make_plan(params, mesh, units=["b"], local=["b"])
    assert torch.equal(fs.init_shards(init, own, mesh)["b"]["float32.local"], numpys)

    def reset(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            nn.init.constant_(parameter, mesh.rank // 2 if name == "bias" else 1.0)

    plan = fs.make_plan(fs.make_functional(net)[1], mesh, units=["*"])
    with pytest.raises(ValueError, match=rf"leaf '0.bias' of the module after its reset {words.format(2)}"):
        fs.init_module(net, plan, mesh, reset=reset)


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_fault_of_one_rank_is_raised_on_all_of_them(mesh: fs.Mesh, failing: int) -> None:
    plan = fs.make_plan({"a": torch.zeros(2)}, mesh)
    whose = "" if mesh.rank == failing else rf" \(found on rank {failing}\)"
    with pytest.raises(ValueError, match=rf"leaf 'a' of init\(unit\) must have shape .* or make a new plan{whose}$"):
        fs.init_shards(lambda unit: {"a": torch.zeros(3 if mesh.rank == failing else 2)}, plan, mesh)
    net = on_meta(lambda: nn.Linear(2, 2))
    plan = fs.make_plan(fs.make_functional(net)[1], mesh)
    with pytest.raises(ValueError, match=rf"no reset wrote \['bias', 'weight'\].*{whose}$"):
        fs.init_module(net, plan, mesh, reset=None if mesh.rank != failing else lambda module: None)
