"""Names come in module order, whatever the units and however a pytree sorts its keys."""

import collections

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.ranks import on_ranks

UNITS = {"none": [], "nested": ["body", "body.z"], "a group": [["body.z", "head"]], "backwards": ["head", "body", "conv"]}


class Net(nn.Module):
    """Names whose order is neither alphabetic nor that of any units; a tie, buffers, a container without parameters."""

    def __init__(self):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.table = nn.Embedding(5, 4)
        self.conv = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
        self.body = nn.ModuleDict({"z": nn.Linear(4, 4), "a": nn.Linear(4, 4)})
        self.stats = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.table.weight


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


def test_two_modules_in_one_tree_keep_the_order_of_each():
    nets = {"second": Net(), "first": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))}
    params = {name: fs.make_functional(net)[1] for name, net in nets.items()}
    plan = fs.make_plan(params, 2)
    assert list(plan.names) == [f"{name}.{key}" for name, net in nets.items() for key in net.state_dict()]


def test_a_plan_from_json_without_names_keeps_the_sorted_order():
    params = {"w": torch.zeros(2), "b": torch.zeros(1)}
    text = fs.make_plan(params, 1).to_json().replace('"names":["w","b"],', "")
    plan = fs.Plan.from_json(text)
    assert plan.names == ()
    assert list(fs.gather(fs.shard(params, plan, fs.Mesh()), plan, fs.Mesh())) == ["b", "w"]
