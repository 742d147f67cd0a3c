"""State dicts, whole and in pieces, lead back to the same shards on every rank, or raise on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcshard as fs
from funcshard._utils import tree
from tests.checkpoint.test_optimizer_state import optax_momentum
from tests.ranks import on_ranks

O = torch.optim  # noqa: E741


def two_groups(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    return fs.torch_optimizer(O.AdamW, lr=0.1, groups=[{"paths": ["a"], "lr": 0.2}], plan=plan, mesh=mesh)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda plan, mesh: fs.torch_optimizer(O.AdamW, lr=0.1),
    "AdamW groups": two_groups,
    "SGD with momentum": lambda plan, mesh: fs.torch_optimizer(O.SGD, lr=0.1, momentum=0.9),
    "SGD without state": lambda plan, mesh: fs.torch_optimizer(O.SGD, lr=0.1),
    "Adamax": lambda plan, mesh: fs.torch_optimizer(O.Adamax, lr=0.1),
    "Muon": lambda plan, mesh: fs.muon(plan, mesh, lr=0.1),
    "a pair": lambda plan, mesh: optax_momentum(0.1),
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
            _, state = optimizer[1](grads, state, shards)
        else:
            shards, state = optimizer.step(grads, state, shards)
    return state


def check_equal(one: Any, other: Any) -> None:
    (structure, leaves, _), (wanted, others, _) = tree.describe(one), tree.describe(other)
    assert structure == wanted
    for a, b in zip(leaves, others, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        else:
            assert a == b


def there_and_back(mesh: fs.Mesh, leaves: Any, units: list[str], strategy: str, optimizer: str) -> None:
    params = params_of(leaves, mesh)
    local = {name: AXES[kind] for name, _, kind in leaves if kind}
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy, local=local)
    shards = fs.shard(params, plan, mesh)
    for form in ({"sharded": True}, {}):
        found = fs.to_state_dict(shards, plan, mesh, **form)
        assert sorted(found) == sorted(params)
        check_equal(fs.from_state_dict(found, plan, mesh), shards)
    made = OPTIMIZERS[optimizer](plan, mesh)
    state = steps_of(made, shards)
    full = fs.optimizer_to_state_dict(state, made, plan, mesh)
    for form in ({"sharded": True}, {}, *([] if optimizer == "a pair" else [{"sharded": True, "flatten": True}])):
        found = fs.optimizer_to_state_dict(state, made, plan, mesh, **form)
        again = fs.optimizer_from_state_dict(found, made, plan, mesh, steps=2)
        assert tree.describe(again)[0] == tree.describe(state)[0]
        # by name, because padding, which has no name, may differ
        check_equal(fs.optimizer_to_state_dict(again, made, plan, mesh), full)


shapes = st.lists(st.integers(0, 4), max_size=2).map(tuple)
worlds = st.sampled_from([{"shard": n} for n in range(1, 5)] + [{"replicate": 2, "shard": n} for n in (1, 2)])


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(["", "", "", *AXES])), min_size=1, max_size=4),
    worlds,
    st.sampled_from(["full_shard", "shard_grad_op", "no_shard"]),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.data(),
)
def test_every_plan_leads_there_and_back(
    leaves: list[Any], world: Any, strategy: str, optimizer: str, data: st.DataObject
) -> None:
    named = [(name, shape, kind) for name, (shape, kind) in zip("abcd", leaves, strict=False)]
    units = data.draw(st.lists(st.sampled_from([name for name, *_ in named]), unique=True))
    fs.simulate(lambda mesh: there_and_back(mesh, named, units, strategy, optimizer), world)


@pytest.mark.parametrize("world", [2, 4])
@on_ranks()
def test_a_rank_that_holds_nothing_of_a_leaf(mesh: fs.Mesh, world: int) -> None:
    there_and_back(mesh, [("a", (4, 4), ""), ("b", (4,), "")], [], "full_shard", "AdamW")


# --- faults ---------------------------------------------------------------------------------------

PARAMS = {"a": torch.arange(16.0).view(4, 4), "b": torch.arange(4.0)}


def without(state_dict: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state_dict.items() if name not in names}


def changed_piece(**values: Any) -> Any:
    """Return a change that makes the first piece other; values may be functions of the piece."""
    value_of = lambda value, piece: value(piece) if callable(value) else value  # noqa: E731
    return lambda d, p: {**p, "a": p["a"]._replace(**{key: value_of(value, p["a"]) for key, value in values.items()})}


# From the whole state dict and a rank's pieces: what a rank passes.
FAULTS: dict[str, tuple[Any, str]] = {
    "a leaf is missing": (lambda d, p: without(d, "b"), r"missing: \['b'\]: it is of another module, or"),
    "a piece is missing": (lambda d, p: without(p, "b"), r"missing: \['b'\]: it holds pieces of other leaves; pass the pi"),
    "nothing": (lambda d, p: {}, r"missing: \['a', 'b'\]: it is empty, as rank0_only=True leaves it .* pass src=0"),
    "a prefix": (
        lambda d, p: {f"module.{name}": value for name, value in d.items()},
        r"carry the prefix 'module\.' that has to be removed: call torch\.nn\.modules\.utils\.consume_prefix",
    ),
    "a prefix, and one missing": (
        lambda d, p: {"module.a": d["a"]}, r"its names carry a prefix such as 'module\.' that has to be removed",
    ),
    "shards": (
        lambda d, p: {"": {"float32": torch.zeros(4)}}, r"it is a tree of shards; to_state_dict\(shards, plan, mesh\)",
    ),
    "a nested one": (lambda d, p: {"model": {"x": torch.zeros(4, 4)}}, "it is of another module, or its names"),
    "another shape": (lambda d, p: {**d, "b": torch.zeros(5)}, r"leaf 'b' of the state dict must have shape .*new plan"),
    "another dtype": (lambda d, p: {**d, "b": torch.zeros(4).half()}, r"leaf 'b' .* dtype float32, .* and float16"),
    "on meta": (
        lambda d, p: {**d, "b": torch.zeros(4, device="meta")}, "leaf 'b' of the state dict is on the meta device",
    ),
    "no tensor": (lambda d, p: {**d, "b": 3}, "leaf 'b' .* must be a tensor, a DTensor, a Piece .* found int"),
    "a piece of another shape": (
        changed_piece(shape=(5,)), r"pieces of leaf 'a' .* must be of shape \(4, 4\) and .*; found \(5,\) and",
    ),
    "a piece of another dtype": (
        changed_piece(tensor=lambda piece: piece.tensor.half()), r"dtype float32, as planned; found \(4, 4\) and float16",
    ),
    "too short": (
        changed_piece(tensor=lambda piece: piece.tensor[:-1]), "pieces of leaf 'a' .* must cover .* no piece holds element",
    ),
    "without its begin": (
        changed_piece(tensor=lambda piece: piece.tensor[2:], offset=lambda piece: piece.offset + 2),
        r"no piece holds element (0|10): pass the pieces of all ranks",
    ),
    **{
        f"an offset of {offset}": (
            changed_piece(offset=offset), rf"must lie inside its 16 elements; found offset {offset} with .*: count offset",
        )
        for offset in (-1, 11)
    },
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
    check_equal(fs.from_state_dict(pieces if mesh.rank else PARAMS, plan, mesh), shards)
