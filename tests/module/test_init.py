"""Initialisation unit by unit: the whole module's values, with one unit's parameters in memory."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import run_ranks

WORLDS = [1, 2, 3, {"replicate": 2, "shard": 2}]


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


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("case", MODULES)
def test_the_values_are_those_of_the_whole_module(case: str, world: Any) -> None:
    build, units = MODULES[case]
    whole = build()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        whole.apply(reset)
    net = on_meta(build)
    _, params, _ = fs.make_functional(net)

    def main(mesh: fs.Mesh) -> Any:
        torch.manual_seed(7)
        plan = fs.make_plan(params, mesh, units=units)
        shards, buffers = fs.init_module(net, plan, mesh)
        return fs.gather(shards, plan, mesh), buffers

    for params_, buffers in fs.simulate(main, world):
        for found, expected in ((params_, dict(whole.named_parameters())), (buffers, dict(whole.named_buffers()))):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))


def _on_processes(mesh: fs.Mesh) -> Any:
    net = on_meta(Net)
    _, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    return fs.gather(fs.init_module(net, plan, mesh)[0], plan, mesh)


@pytest.mark.slow
def test_processes_make_what_one_rank_makes() -> None:
    torch.manual_seed(0)
    alone = _on_processes(fs.Mesh())
    for found in run_ranks(_on_processes, 2):
        assert all(torch.equal(found[name], value) for name, value in alone.items())


class Alive:
    """The highest number of bytes in living storages, of the tensors that ``see`` was given."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def see(self, tensors: Iterator[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.seen = {key: (ref, size) for key, (ref, size) in self.seen.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self.seen.values()))


def most_of_a_unit(plan: fs.Plan) -> int:
    return max(sum(buffer.numel * buffer.itemsize for buffer in unit.buffers) for unit in plan.unit_list)


def test_of_a_module_only_one_units_parameters_exist_at_a_time() -> None:
    net = on_meta(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(5)]))
    _, params, _ = fs.make_functional(net)

    def main(mesh: fs.Mesh) -> None:
        alive = Alive()
        plan = fs.make_plan(params, mesh, units=["*"])

        def watched(module: nn.Module) -> None:
            reset(module)
            alive.see(p for p in module.parameters() if type(p) is nn.Parameter)

        fs.init_module(net, plan, mesh, reset=watched)
        assert alive.most == most_of_a_unit(plan)
        alive.see(iter(()))
        assert not alive.seen

    fs.simulate(main, 2)


def test_of_a_function_only_one_units_leaves_exist_at_a_time() -> None:
    params = {name: torch.empty(50, device="meta") for name in "abcde"}

    def main(mesh: fs.Mesh) -> None:
        alive = Alive()
        plan = fs.make_plan(params, mesh, units=list("abcde"))

        def init(unit: Any) -> dict[str, torch.Tensor]:
            values = {leaf.path: torch.randn(leaf.shape) for leaf in unit.leaves}
            alive.see(iter(values.values()))
            return values

        fs.init_shards(init, plan, mesh)
        assert alive.most == most_of_a_unit(plan)
        alive.see(iter(()))
        assert not alive.seen

    fs.simulate(main, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_function_is_asked_for_each_unit_in_plan_order(strategy: str, world: Any) -> None:
    params = {"a": torch.empty(5, device="meta"), "b": [torch.empty(2, 3, device="meta"), torch.empty((), device="meta")]}

    def main(mesh: fs.Mesh) -> Any:
        asked = []

        def init(unit: Any) -> dict[str, torch.Tensor]:
            asked.append(unit.name)
            return {leaf.path: torch.randn(leaf.shape) for leaf in unit.leaves}

        plan = fs.make_plan(params, mesh, units=["b"], strategy=strategy)
        torch.manual_seed(1)
        gathered = fs.gather(fs.init_shards(init, plan, mesh), plan, mesh)
        assert asked == ["", "b"]
        torch.manual_seed(1)
        expected = [torch.randn(5), torch.randn(2, 3), torch.randn(())]
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(gathered), expected, strict=True))

    fs.simulate(main, world)


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
    "in part": (lambda: Reaches(lambda m: m[0].weight[0].fill_(float("nan"))), "'0.weight' was read"),
    "reads another unit": (lambda: Reaches(lambda m: m[0].weight.sum()), "'0.weight' was read .*unit '0'"),
    "writes another unit": (lambda: Reaches(lambda m: nn.init.ones_(m[1].bias)), "only parameters of its own unit exist"),
    "through data": (lambda: Reaches(lambda m: m[1].bias.data.zero_()), r"while module '\(root\)' \(Reaches\) was reset"),
}


@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED)
def test_a_reset_that_leaves_garbage_is_refused(build: Callable[[], nn.Module], words: str) -> None:
    net = on_meta(build)
    _, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, 1, units=["*"] if isinstance(net, Reaches) else [])
    with pytest.raises(ValueError, match=rf"(?s){words}"):
        fs.init_module(net, plan, fs.Mesh())


def test_a_parameter_written_in_part_is_refused() -> None:
    net = on_meta(lambda: nn.Linear(2, 2))
    _, params, _ = fs.make_functional(net)
    with pytest.raises(ValueError, match="'weight' still has elements that its module's reset did not write"):
        fs.init_module(net, fs.make_plan(params, 1), fs.Mesh(), reset=lambda m: m.weight[0].zero_())


def test_infinite_values_count_as_written() -> None:
    # Their sum is NaN, as that of a parameter that was written in part.
    net = on_meta(lambda: nn.Linear(2, 1, bias=False))
    plan = fs.make_plan(fs.make_functional(net)[1], 1)
    values = torch.tensor([[math.inf, -math.inf]])
    shards, _ = fs.init_module(net, plan, fs.Mesh(), reset=lambda m: m.weight.copy_(values))
    assert torch.equal(shards[""]["float32"], values.view(-1))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"a": torch.zeros(2)}, r"leaves of unit '\(root\)', \['a', 'b'\]; found \['a'\]"),
        (None, r"leaves of unit '\(root\)', \['a', 'b'\]; found NoneType"),
        ({"a": torch.zeros(3), "b": torch.zeros(2)}, r"leaf 'a' of init\(unit\) must have shape \(2,\) and dtype float32"),
    ],
    ids=["missing", "nothing", "shape"],
)
def test_what_init_must_return(values: Any, words: str) -> None:
    plan = fs.make_plan({"a": torch.zeros(2), "b": torch.zeros(2)}, 1)
    with pytest.raises(ValueError, match=words):
        fs.init_shards(lambda unit: values, plan, fs.Mesh())


def numpys(mesh: fs.Mesh) -> torch.Tensor:
    return torch.full((2,), float(mesh.rank // 2))  # as numpy's generator would give, seeded by rank


@pytest.mark.parametrize("world", [4, {"replicate": 2, "shard": 2}], ids=str)
def test_ranks_that_make_different_values_get_an_error(world: Any) -> None:
    words = r"must have the same values on every rank; found 2 different ones, on ranks 0, 1; ranks 2, 3 \(1 of \d leaves"

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan({"a": torch.zeros(2), "b": torch.zeros(2)}, mesh, units=["b"])
        init = lambda unit: {leaf.path: numpys(mesh) if leaf.path == "b" else torch.randn(2) for leaf in unit.leaves}  # noqa: E731
        with pytest.raises(ValueError, match=rf"leaf 'b' of init\(unit\) {words} differ\): draw random numbers from torch"):
            fs.init_shards(init, plan, mesh)
        own = fs.make_plan({"a": torch.zeros(2), "b": torch.zeros(2)}, mesh, units=["b"], local=["b"])
        assert torch.equal(fs.init_shards(init, own, mesh)["b"]["float32.local"], numpys(mesh))

        net = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        plan = fs.make_plan(fs.make_functional(net)[1], mesh, units=["*"])

        def reset(module: nn.Module) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                nn.init.constant_(parameter, mesh.rank // 2 if name == "bias" else 1.0)

        with pytest.raises(
            ValueError, match=rf"leaf '0.bias' of the module after its reset {words.replace('1 of', '2 of')}"
        ):
            fs.init_module(net, plan, mesh, reset=reset)

    fs.simulate(main, world)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_fault_of_one_rank_is_raised_on_all_of_them(failing: int) -> None:
    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan({"a": torch.zeros(2)}, mesh)
        whose = "" if mesh.rank == failing else rf" \(found on rank {failing}\)"
        with pytest.raises(ValueError, match=rf"leaf 'a' of init\(unit\) must have shape .* or make a new plan{whose}$"):
            fs.init_shards(lambda unit: {"a": torch.zeros(3 if mesh.rank == failing else 2)}, plan, mesh)
        net = on_meta(lambda: nn.Linear(2, 2))
        plan = fs.make_plan(fs.make_functional(net)[1], mesh)
        with pytest.raises(ValueError, match=rf"no reset wrote \['bias', 'weight'\].*{whose}$"):
            fs.init_module(net, plan, mesh, reset=None if mesh.rank != failing else lambda module: None)

    fs.simulate(main, 2)
