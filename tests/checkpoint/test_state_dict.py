"""State dicts hold the values of shards under the module's names, in its order, and lead back or raise on every rank."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchopt
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import funcshard as fs
from funcshard._utils import tree
from tests.checkpoint.test_optimizer_state import optax_momentum
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_ranks, run_simulated
from tests.states import equal
from tests.storages import Alive


class Net(nn.Module):
    """Names whose order is neither alphabetic nor that of any units; ties, buffers, a container without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.table = nn.Embedding(5, 4)
        self.conv = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
        self.again = self.conv[1]
        self.body = nn.ModuleDict({"z": nn.Linear(4, 4), "a": nn.Linear(4, 4)})
        self.stats = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.table.weight


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    return net


MODULES = {
    "linear": lambda: nn.Linear(3, 5),
    "tied": Net,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)),
    "frozen": frozen,
    "mixed dtypes": lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()),
    "no parameters": lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False)),
    "LSTM": lambda: nn.LSTM(3, 4, 2),
}
over_modules = crossed(
    make=MODULES,
    world=[2, 3, {"replicate": 2, "shard": 2}],
    strategy=["full_shard", "no_shard"],
    units=["all", "none"],
)


@pytest.mark.slow
@over_modules
def test_state_dicts_and_pieces_are_the_modules_and_lead_back_to_the_shards(make, world, strategy, units) -> None:
    net = make()
    apply, params, buffers = fs.make_functional(net)
    wanted = {name: value.clone() for name, value in net.state_dict().items()}

    def main(mesh: fs.Mesh) -> dict[str, fs.Piece]:
        plan = fs.make_plan(params, mesh, units=fs.wrap.always()(net) if units == "all" else [], strategy=strategy)
        shards = fs.shard(params, plan, mesh)
        kept = apply.persistent(buffers)
        full = fs.to_state_dict(shards, plan, mesh, buffers=kept)
        first = fs.to_state_dict(shards, plan, mesh, buffers=kept, rank0_only=True, offload=True)
        with fs.record_events() as events:
            pieces = fs.to_state_dict(shards, plan, mesh, sharded=True)
        assert events == []
        storages = {leaf.data_ptr() for leaf in tree.leaves(shards)}
        bases = [piece.tensor.untyped_storage().data_ptr() for piece in pieces.values() if piece.tensor.numel()]
        assert storages.issuperset(bases), "pieces are views of the shards"
        pieces = {name: piece._replace(tensor=piece.tensor.clone()) for name, piece in pieces.items()}
        with torch.no_grad():
            loaded = [fs.from_state_dict(form, plan, mesh) for form in (full, net.state_dict())]
            loaded.append(fs.from_state_dict(first, plan, mesh, src=0))
        for again in loaded:
            assert tree.describe(again)[0] == tree.describe(shards)[0]
            assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(shards), strict=True))
        for shard in tree.leaves([shards, *loaded]):
            shard.detach().zero_()  # they share no memory with a state dict
        assert equal(full, wanted)
        assert equal(first, wanted) if mesh.rank == 0 else first == {}
        assert not any(value.requires_grad for value in full.values())
        other = make()
        assert str(other.load_state_dict(full, strict=True)) == "<All keys matched successfully>"
        assert equal(dict(other.state_dict()), wanted)
        return pieces

    by_rank = fs.simulate(main, world)
    assert equal(dict(net.state_dict()), wanted)
    leaves = dict(net.named_parameters(remove_duplicate=False))
    once: dict[str, list[fs.Piece]] = {name: [] for name in leaves}
    for name, piece in (item for pieces in by_rank for item in pieces.items()):
        assert torch.equal(piece.tensor, leaves[name].flatten()[piece.offset :][: len(piece.tensor)])
        if piece.copy == 0:
            once[name].append(piece)
    for name, pieces in once.items():
        assert sum(len(piece.tensor) for piece in pieces) == leaves[name].numel()

    def load(mesh: fs.Mesh) -> dict[str, torch.Tensor]:
        plan = fs.make_plan(params, mesh, units=fs.wrap.always()(net))
        return fs.gather(fs.from_state_dict(once, plan, mesh), plan, mesh)

    for loaded in fs.simulate(load, 3):
        assert all(torch.equal(loaded[name], leaves[name]) for name in loaded)


class Spread(torch.Tensor):
    """A tensor that has ``full_tensor``, by which a DTensor is recognised."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("present", [["table.weight"], ["head.weight"], ["table.weight", "head.weight"]], ids=str)
@pytest.mark.parametrize("form", [torch.clone, lambda value: value.as_subclass(Spread)], ids=["tensors", "spread tensors"])
def test_a_tied_parameter_may_stand_under_any_of_its_names(form: Any, present: list[str]) -> None:
    _, params, _ = fs.make_functional(Net())
    plan = fs.make_plan(params, 1)
    full = fs.to_state_dict(fs.shard(params, plan, fs.Mesh()), plan, fs.Mesh())
    left_out = {"table.weight", "head.weight"} - set(present)
    kept = {name: form(value) for name, value in full.items() if name not in left_out}
    again = fs.from_state_dict(kept, plan, fs.Mesh())
    assert equal(fs.to_state_dict(again, plan, fs.Mesh()), full)


def test_two_trees_of_one_module_do_not_mix_their_tied_names() -> None:
    _, params, _ = fs.make_functional(Net())
    both = {"student": params, "teacher": {name: value.detach() * 2 for name, value in params.items()}}
    plan = fs.make_plan(both, 1)
    state_dict = fs.to_state_dict(fs.shard(both, plan, fs.Mesh()), plan, fs.Mesh())
    assert {name.partition(".")[0] for name in state_dict} == {"student", "teacher"}


@pytest.mark.parametrize("rank0_only", [False, True], ids=["all ranks", "rank 0"])
def test_one_flat_buffer_exists_in_full_at_a_time(rank0_only: bool) -> None:
    params = {f"blocks.{i}": {"a": torch.ones(3 + i, 5), "b": torch.ones(7), "c": torch.ones(13).double()} for i in range(4)}
    plan = fs.make_plan(params, 2, units=[f"blocks.{i}" for i in range(4)])
    sizes = {buffer.padded_numel * buffer.itemsize for unit in plan.unit_list for buffer in unit.buffers}
    buffers = sum(len(unit.buffers) for unit in plan.unit_list)

    def main(mesh: fs.Mesh) -> tuple[int, int]:
        shards = fs.shard(params, plan, mesh)
        with Alive(sizes.__contains__) as peak:
            fs.to_state_dict(shards, plan, mesh, rank0_only=rank0_only, offload=True)
        with Alive(sizes.__contains__) as several, torch.no_grad():  # which the mode can see
            whole = [fs.unshard(lambda leaves: leaves, unit, mesh)(shards[unit.name]) for unit in plan.unit_list]
        assert len(whole) == 4
        assert several.most > 1
        return peak.made, peak.most

    assert fs.simulate(main, 2) == [(buffers, 1)] * 2


def test_pieces_are_not_offloaded() -> None:
    plan = fs.make_plan({"a": torch.ones(2)}, 1)
    with pytest.raises(ValueError, match=r"sharded=True gives each rank the pieces .* leave them out"):
        fs.to_state_dict(fs.shard({"a": torch.ones(2)}, plan, fs.Mesh()), plan, fs.Mesh(), sharded=True, offload=True)


UNITS = {"none": [], "nested": ["body", "body.z"], "a group": [["body.z", "head"]], "backwards": ["head", "body", "conv"]}


@pytest.mark.parametrize("units", UNITS)
@on_ranks(2)
def test_state_dicts_and_gathered_params_are_in_the_order_of_the_module(mesh: fs.Mesh, units):
    net = Net()
    apply, params, buffers = fs.make_functional(net)
    wanted = list(net.state_dict())
    own = list(dict(net.named_parameters(remove_duplicate=False)))
    plan = fs.make_plan(params, mesh, units=UNITS[units])
    shards = fs.shard(params, plan, mesh)
    assert list(fs.gather(shards, plan, mesh)) == list(params)
    assert list(fs.to_state_dict(shards, plan, mesh)) == own
    assert list(fs.to_state_dict(shards, plan, mesh, sharded=True)) == own
    assert list(fs.to_state_dict(shards, plan, mesh, buffers=apply.persistent(buffers))) == wanted
    first = fs.to_state_dict(shards, plan, mesh, buffers=apply.persistent(buffers), rank0_only=True, offload=True)
    assert list(first) == (wanted if mesh.rank == 0 else [])
    more = fs.to_state_dict(shards, plan, mesh, buffers={"later": torch.zeros(1)})
    assert list(more) == [*own, "later"]
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    _, opt_state = optimizer.step(shards, optimizer.init(shards), shards)
    state = fs.optimizer_to_state_dict(opt_state, optimizer, plan, mesh)["state"]
    assert list(state) == list(params)


@on_ranks(2)
def test_nested_dictionaries_come_back_in_the_order_in_which_they_were_given(mesh: fs.Mesh):
    params = {
        "z": {"w": torch.zeros(2), "a": [torch.ones(1), {"y": torch.zeros(1), "b": torch.zeros(3)}]},
        "b": collections.OrderedDict(y=torch.zeros(1), c=torch.zeros(2)),
        "a.x": torch.zeros(1),
        "a.b": None,
        "a": {"q": torch.zeros(1), "c": torch.zeros(1)},
    }

    def keys(tree):
        return {key: keys(tree[key]) for key in tree} if isinstance(tree, dict) else None

    plan = fs.make_plan(params, mesh, units=["z.a", "a", "b"])
    back = fs.gather(fs.shard(params, plan, mesh), plan, mesh)
    assert str(keys(back["z"])) == str(keys(params["z"]))
    assert list(back["z"]["a"][1]) == ["y", "b"]
    assert list(back["b"]) == ["y", "c"]
    assert [key for key in back if back[key] is not None] == ["z", "b", "a.x", "a"]


def test_the_order_of_names_is_no_part_of_a_plans_identity():
    one = {"w": torch.zeros(2), "b": torch.zeros(1)}
    plans = [fs.make_plan(params, 2) for params in (one, dict(sorted(one.items())))]
    assert plans[0] == plans[1]
    assert plans[0].fingerprint() == plans[1].fingerprint()
    assert [plan.names for plan in plans] == [("w", "b"), ("b", "w")]
    assert fs.Plan.from_json(plans[0].to_json()).names == ("w", "b")


def test_a_plan_from_json_without_names_keeps_the_sorted_order():
    params = {"w": torch.zeros(2), "b": torch.zeros(1)}
    text = fs.make_plan(params, 1).to_json().replace('"names":["w","b"],', "")
    plan = fs.Plan.from_json(text)
    assert plan.names == ()
    assert list(fs.gather(fs.shard(params, plan, fs.Mesh()), plan, fs.Mesh())) == ["b", "w"]


O = torch.optim  # noqa: E741


def of_torch(cls: type[O.Optimizer], **options: Any) -> Any:
    return lambda plan, mesh: fs.torch_optimizer(cls, lr=0.1, plan=plan, mesh=mesh, **options)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": of_torch(O.AdamW),
    "AdamW groups": of_torch(O.AdamW, groups=[{"paths": ["a"], "lr": 0.2}]),
    "SGD with momentum": of_torch(O.SGD, momentum=0.9),
    "SGD without state": of_torch(O.SGD),
    "Adamax": of_torch(O.Adamax),
    "Muon": lambda plan, mesh: fs.muon(plan, mesh, lr=0.1),
    "a pair": lambda plan, mesh: optax_momentum(0.1),
    "a pair of TorchOpt": lambda plan, mesh: torchopt.adamw(0.1, weight_decay=0.1),
}
AXES = {"": (), "row": ("replicate",), "column": ("shard",), "own": ("replicate", "shard")}


def params_of(leaves: list[tuple[str, tuple[int, ...], str]], mesh: fs.Mesh) -> dict[str, torch.Tensor]:
    """Return leaves whose values differ along their local axes."""
    index = {"": 0, "row": mesh.replicate.rank, "column": mesh.shard.rank, "own": mesh.rank}
    return {
        name: torch.rand(shape, generator=torch.Generator().manual_seed(1 + index[kind])) for name, shape, kind in leaves
    }


def steps_of(optimizer: Any, shards: Any) -> Any:
    """Return the state of an optimizer after two steps on some gradients."""
    shards = tree.map(torch.clone, shards)  # the steps donate them
    grads, is_pair = tree.map(torch.clone, shards), not hasattr(optimizer, "step")
    state = optimizer[0](shards)
    for _ in range(2):
        if is_pair:
            _, state = optimizer[1](tree.map(torch.clone, grads), state, params=shards)
        else:
            shards, state = optimizer.step(grads, state, shards)
    return state


def there_and_back(mesh: fs.Mesh, leaves: Any, units: list[str], strategy: str, optimizer: str) -> None:
    params = params_of(leaves, mesh)
    local = {name: AXES[kind] for name, _, kind in leaves if kind}
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy, local=local)
    shards = fs.shard(params, plan, mesh)
    for form in ({"sharded": True}, {}):
        found = fs.to_state_dict(shards, plan, mesh, **form)
        assert sorted(found) == sorted(params)
        assert equal(fs.from_state_dict(found, plan, mesh), shards)
    made = OPTIMIZERS[optimizer](plan, mesh)
    state = steps_of(made, shards)
    full = fs.optimizer_to_state_dict(state, made, plan, mesh)
    pieces = fs.optimizer_to_state_dict(state, made, plan, mesh, sharded=True)
    for found in (full, pieces, *([] if "pair" in optimizer else [fs.flatten_optimizer_state_dict(pieces)])):
        again = fs.optimizer_from_state_dict(found, made, plan, mesh, steps=2)
        assert tree.describe(again)[0] == tree.describe(state)[0]
        # by name, because padding, which has no name, may differ
        assert equal(fs.optimizer_to_state_dict(again, made, plan, mesh), full)


shapes = st.lists(st.integers(0, 4), max_size=2).map(tuple)
worlds = st.sampled_from([{"shard": n} for n in range(1, 5)] + [{"replicate": 2, "shard": n} for n in (1, 2)])


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(["", "", "", *AXES])), min_size=1, max_size=4),
    worlds,
    st.sampled_from(["full_shard", "shard_grad_op", "no_shard"]),
    # Why without TorchOpt's: its counts look like shards of a buffer of one element, and do not lead back there.
    st.sampled_from(sorted(OPTIMIZERS.keys() - {"a pair of TorchOpt"})),
    st.data(),
)
def test_every_plan_leads_there_and_back(leaves, world, strategy: str, optimizer: str, data: st.DataObject) -> None:
    named = [(name, shape, kind) for name, (shape, kind) in zip("abcd", leaves, strict=False)]
    units = data.draw(st.lists(st.sampled_from([name for name, *_ in named]), unique=True))
    fs.simulate(lambda mesh: there_and_back(mesh, named, units, strategy, optimizer), world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("optimizer", ["AdamW", "a pair of TorchOpt"])
@on_ranks()
def test_a_rank_that_holds_nothing_of_a_leaf(mesh: fs.Mesh, optimizer: str, world: int) -> None:
    there_and_back(mesh, [("a", (4, 4), ""), ("b", (4,), "")], [], "full_shard", optimizer)


PARAMS = {"a": torch.arange(16.0).view(4, 4), "b": torch.arange(4.0)}


def changed_piece(**values: Any) -> Any:
    """Return a change that makes the first piece other; values may be functions of the piece."""
    value_of = lambda value, piece: value(piece) if callable(value) else value  # noqa: E731
    return lambda d, p: {**p, "a": p["a"]._replace(**{key: value_of(value, p["a"]) for key, value in values.items()})}


# From the whole state dict and a rank's pieces: what a rank passes.
FAULTS: dict[str, tuple[Any, str]] = {
    "a leaf is missing": (lambda d, p: {"a": d["a"]}, r"missing: \['b'\]: it holds .*, so it is of another module, a"),
    "nothing": (lambda d, p: {}, r"missing: \['a', 'b'\]: it is empty; if rank0_only=True left it so, pass src=0"),
    "a prefix": (lambda d, p: {f"module.{name}": d[name] for name in d}, r"the prefix 'module\.' .*\.utils\.consume_prefix"),
    "another shape": (lambda d, p: {**d, "b": torch.zeros(5)}, r"leaf 'b' of the state dict must have shape .*new plan"),
    "another dtype": (lambda d, p: {**d, "b": torch.zeros(4).half()}, r"leaf 'b' .* dtype float32, .* and float16"),
    "on meta": (lambda d, p: {**d, "b": torch.zeros(4, device="meta")}, "leaf 'b' of .* is on the meta device"),
    "no tensor": (lambda d, p: {**d, "b": 3}, "leaf 'b' .* must be a tensor, a DTensor, a Piece .* found int"),
    "a piece of another shape": (changed_piece(shape=(5,)), r"'a' .* must be 1-D, of shape \(4, 4\) .*; found \(5,\) and"),
    "a piece of another dtype": (changed_piece(tensor=lambda piece: piece.tensor.half()), r"found \(4, 4\) and float16"),
    "too short": (changed_piece(tensor=lambda piece: piece.tensor[:-1]), "'a' .* must cover .* no piece holds element"),
    "without its begin": (
        changed_piece(tensor=lambda piece: piece.tensor[2:], offset=lambda piece: piece.offset + 2),
        r"no piece holds element (0|10): pass the pieces of all ranks",
    ),
    "an offset of -1": (changed_piece(offset=-1), "must lie inside its slice of .* elements at offset -1 within .*: pass"),
    "an offset of 11": (changed_piece(offset=11), "must lie inside its slice of .* elements at offset 11 within .*: pass"),
}  # fmt: skip


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_a_fault_of_one_rank_is_raised_on_all_of_them(mesh: fs.Mesh, fault: str, failing: int) -> None:
    change, words = FAULTS[fault]
    plan = fs.make_plan(PARAMS, mesh)
    shards = fs.shard(PARAMS, plan, mesh)
    whole, pieces = fs.to_state_dict(shards, plan, mesh), fs.to_state_dict(shards, plan, mesh, sharded=True)
    given = change(whole, pieces) if mesh.rank == failing else whole
    whose = "" if mesh.rank == failing else rf" \(found on rank {failing}\)$"
    with pytest.raises(ValueError, match=f"{words}.*{whose}"):
        fs.from_state_dict(given, plan, mesh)
    if fault in ("a leaf is missing", "another shape", "another dtype"):
        with pytest.raises(ValueError, match=words):
            fs.from_state_dict(given, plan, mesh, src=failing)


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_fault_of_one_ranks_optimizer_state_is_raised_on_all_of_them(mesh: fs.Mesh, failing: int) -> None:
    plan = fs.make_plan(PARAMS, mesh)
    optimizer = OPTIMIZERS["AdamW"](plan, mesh)
    state = steps_of(optimizer, fs.shard(PARAMS, plan, mesh))
    found = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)
    whose = "" if mesh.rank == failing else rf" \(found on rank {failing}\)$"
    changes = {
        r"every trainable leaf; missing: \['b'\]": lambda: found["state"].pop("b"),
        r"leaf 'b' of 'exp_avg' .* must have shape \(4,\)": lambda: found["state"]["b"].update(exp_avg=torch.zeros(5)),
    }
    for words, change in changes.items():
        found = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)
        if mesh.rank == failing:
            change()
        with pytest.raises(ValueError, match=f"{words}.*{whose}"):
            fs.optimizer_from_state_dict(found, optimizer, plan, mesh)


@on_ranks(3)
def test_ranks_may_hold_whole_leaves_and_pieces_of_the_same_values(mesh: fs.Mesh) -> None:
    plan = fs.make_plan(PARAMS, mesh)
    shards = fs.shard(PARAMS, plan, mesh)
    pieces = fs.to_state_dict(shards, plan, mesh, sharded=True)
    assert equal(fs.from_state_dict(pieces if mesh.rank else PARAMS, plan, mesh), shards)


# --- whole parameters, unit by unit -------------------------------------------------------------


def whole(mesh: fs.Mesh, dtype: torch.dtype | None) -> Any:
    torch.manual_seed(0)
    _, params, _ = fs.make_functional(Net())
    plan = fs.make_plan(params, mesh, units=["body"])
    shards = fs.shard(params, plan, mesh)
    pairs = list(fs.iter_params(shards, plan, mesh, dtype=dtype))
    meant = {name: leaf.detach().to(dtype or leaf.dtype) for name, leaf in fs.gather(shards, plan, mesh).items()}
    assert sorted(name for name, _ in pairs) == sorted(meant)  # the tied ones once
    assert all(torch.equal(tensor, meant[name]) and tensor.dtype == meant[name].dtype for name, tensor in pairs)
    for _, tensor in pairs:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # it keeps no unit in memory
        tensor.zero_()  # a copy: neither shards nor other ranks see it
    again = fs.gather(shards, plan, mesh)
    assert all(torch.equal(again[name].to(meant[name].dtype), leaf) for name, leaf in meant.items())


@pytest.mark.parametrize("run", [run_simulated, run_ranks])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shape", [{"shard": 1}, {"shard": 2}, {"replicate": 2, "shard": 1}], ids=str)
def test_each_parameter_comes_once_and_whole(run: Callable[..., Any], dtype: torch.dtype | None, shape: Any) -> None:
    run(whole, shape["shard"] * shape.get("replicate", 1), dtype, shape=shape)


@on_ranks({"shard": 2, "tensor": 2})
def test_slices_are_joined(mesh: fs.Mesh) -> None:
    whole_leaf = torch.arange(24.0).view(4, 6)
    rows = {"w": whole_leaf.chunk(2)[mesh["tensor"].rank]}
    plan = fs.make_plan(rows, mesh, local={"w": {"tensor": 0}})
    pairs = dict(fs.iter_params(fs.shard(rows, plan, mesh), plan, mesh))
    assert torch.equal(pairs["w"], whole_leaf)


@on_ranks(2)
def test_at_most_two_units_are_in_memory_and_one_is_under_way(mesh: fs.Mesh) -> None:
    params = {f"{i}.{name}": torch.full((64, 64), float(i)) for i in range(5) for name in "ab"}
    plan = fs.make_plan(params, mesh, units=[str(i) for i in range(5)])
    shards = fs.shard(params, plan, mesh)
    unit_bytes = 2 * 64 * 64 * 4
    with Alive(lambda nbytes: nbytes >= unit_bytes // 2) as alive, fs.record_events() as events:
        under_way = []
        for name, tensor in fs.iter_params(shards, plan, mesh):
            under_way.append((name, events[-1].unit))
            del tensor
    assert alive.most_of[unit_bytes] == 2
    assert alive.most_bytes <= 2 * unit_bytes + unit_bytes // 2  # and the tensor that is used
    nexts = ["1", "2", "3", "4", "4"]
    assert under_way == [(f"{i}.{name}", nexts[i]) for i in range(5) for name in "ab"]


def test_what_it_does_not_take() -> None:
    params, mesh = {"a": torch.zeros(3)}, fs.Mesh()
    plan = fs.make_plan(params, 1)
    with pytest.raises(TypeError, match="iter_params takes the apply of a model of Hugging Face; found function"):
        fs.iter_params(fs.shard(params, plan, mesh), plan, mesh, apply=lambda: 0)
    local = fs.make_plan(params, 1, local=["a"])
    with pytest.raises(ValueError, match="leaf 'a' is local to each rank"):
        fs.iter_params(fs.shard(params, local, mesh), local, mesh)
