"""Profiles: what they keep of the place where they were made, and what they refuse."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import funcshard as fs
from funcshard.estimate.trace import Run
from funcshard.estimate.trace.tape import Alloc, Save
from tests.estimate.chains import expanded
from tests.module.law import Runs


def chain():
    return fs.make_functional(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))


def test_a_profile_keeps_the_autocast_in_which_it_was_made():
    apply, params, buffers = chain()
    plan = fs.make_plan(params, 1, units=["0", "2"])
    plain = fs.profile(apply, params, buffers, torch.zeros(4, 8))
    with torch.autocast("cpu", torch.bfloat16):
        cast = fs.profile(apply, params, buffers, torch.zeros(4, 8))
    for remat in ([], ["0"]):
        programs = [each.program(plan, remat=remat) for each in (plain, cast)]
        dtypes = [{work.dtype for step in each.steps if isinstance(step, Run) for work in step.work} for each in programs]
        assert dtypes[0] == {"float32"}
        assert "bfloat16" in dtypes[1]


def test_a_dtensor_is_refused():
    apply, params, buffers = chain()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        params = {**params, "2.weight": DTensor.from_local(params["2.weight"], mesh, [Replicate()])}
        with pytest.raises(ValueError, match=re.escape("found a DTensor at '2.weight': profile the model before")):
            fs.profile(apply, params, buffers, torch.zeros(4, 8))
    finally:
        dist.destroy_process_group()


def average(net, x, adjacency=None):
    """Average over neighbours by a sparse matrix, which the layer makes or is passed."""
    if adjacency is None:
        adjacency = torch.sparse_coo_tensor(torch.arange(4).repeat(2, 1), torch.ones(4), (4, 4), check_invariants=False)
    return torch.sparse.mm(adjacency, net.linear(x))


@pytest.mark.filterwarnings("ignore:no FLOPs are counted", "ignore:Sparse invariant checks")
def test_a_sparse_tensor_takes_the_memory_of_its_parts():
    adjacency = torch.eye(4).to_sparse()
    parts = 2 * 4 * 8 + 4 * 4  # indices and values
    apply, params, buffers = fs.make_functional(Runs(average, linear=nn.Linear(8, 8)))
    made = fs.profile(apply, params, buffers, torch.zeros(4, 8))
    passed = fs.profile(apply, params, buffers, torch.zeros(4, 8), adjacency)
    assert passed.inputs - made.inputs == parts
    live = {event.storage: event.bytes for event in expanded(made.tape()) if isinstance(event, Alloc)}
    saved = [live.get(event.storage, 0) for event in expanded(made.tape()) if isinstance(event, Save)]
    assert sum(saved) == parts
