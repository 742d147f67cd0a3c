"""Outside of transforms too, one node makes the leaves of a buffer, and does what it does under torch.func."""

import gc
import re
import warnings

import pytest
import torch
from torch.autograd import forward_ad

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import run_simulated

# The first use of forward-mode AD makes torch import a file that calls a deprecated function of
# torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

PARAMS = {"w": torch.linspace(-1, 1, 12).double().view(3, 4), "b": torch.linspace(0, 1, 3).double()}
STRATEGIES = pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
WORLDS = pytest.mark.parametrize("world", [1, 2])


def layer(leaves, x):
    return torch.tanh(leaves["w"] @ x + leaves["b"])


def setup(mesh, strategy="full_shard", f=layer):
    plan = fs.make_plan(PARAMS, mesh, strategy=strategy)
    run = fs.reshard(fs.unshard(f, plan.units[""], mesh))
    x = torch.linspace(0, 1 + mesh.rank, 4).double()
    return lambda shard: run({"float64": shard}, x), fs.shard(PARAMS, plan, mesh)[""]["float64"]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_it_is_one_node_in_an_ordinary_graph():
    seen = []

    def f(leaves, x):
        seen.append({leaf.grad_fn.name() for leaf in leaves.values()})
        return layer(leaves, x)

    run, shard = setup(fs.Mesh(), f=f)
    run(shard.requires_grad_())
    (names,) = seen
    assert names == {"ShardToLeavesBackward"}


def twice_and_again(mesh, strategy):
    run, shard = setup(mesh, strategy)
    shard.requires_grad_()
    loss = run(shard).square().sum()
    grads = [torch.autograd.grad(loss, shard, retain_graph=keep)[0] for keep in (True, True, False)]
    (first,) = torch.autograd.grad(run(shard).square().sum(), shard, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), shard)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, shard)

    def of(f):
        return torch.func.grad(lambda s: f(s).square().sum())

    close([*grads, first.detach()], [of(run)(shard.detach())] * 4)
    close(second, of(of(run))(shard.detach()))


@STRATEGIES
@WORLDS
def test_backward_runs_several_times_and_twice_over(world, strategy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # anomaly mode warns that it is slow
        for anomaly in (False, True):
            # Why around all ranks: the mode is the process's, and the rank that leaves it last would leave it on.
            with torch.autograd.set_detect_anomaly(anomaly, check_nan=False):
                run_simulated(twice_and_again, world, strategy)


@STRATEGIES
def test_forward_mode_outside_torch_func(strategy):
    run, shard = setup(fs.Mesh(), strategy)
    v = shard.flip(0)
    _, slope = torch.func.jvp(run, (shard,), (v,))
    _, product = torch.func.jvp(torch.func.grad(lambda s: run(s).square().sum()), (shard,), (v,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(shard.clone().requires_grad_(), v)
        out = run(dual)
        (grad,) = torch.autograd.grad(out.square().sum(), dual, create_graph=True)
        close([forward_ad.unpack_dual(each).tangent.detach() for each in (out, grad)], [slope, product])


@pytest.mark.parametrize("how", ["leaf", "without a graph"])
@WORLDS
def test_changing_a_gathered_leaf_in_place_is_an_error(world, how):
    def f(leaves, x):
        with torch.set_grad_enabled(how == "leaf"):
            leaves["w"].mul_(2)
        return layer(leaves, x)

    def main(mesh):
        run, shard = setup(mesh, f=f)
        words = r"the forward of unit '\(root\)' modified a leaf in place[,;] .*gathered leaves are read-only"
        with pytest.raises(RuntimeError, match=words):
            run(shard.requires_grad_())

    fs.simulate(main, world)


def test_the_graph_is_freed_when_nothing_refers_to_it():
    def main(mesh):
        refs = []

        def f(leaves, x):
            refs.append(torch.multiprocessing.reductions.StorageWeakRef(leaves["w"].untyped_storage()))
            return layer(leaves, x)

        run, shard = setup(mesh, f=f)
        shard.requires_grad_()
        gc.disable()
        try:
            run(shard)
            torch.autograd.grad(run(shard).square().sum(), shard)
            (first,) = torch.autograd.grad(run(shard).square().sum(), shard, create_graph=True)
            torch.autograd.grad(first.sum(), shard)
            del first
            assert len(refs) == 3
            assert all(ref.expired() for ref in refs)
        finally:
            gc.enable()

    fs.simulate(main, 2)


def batched(mesh):
    run, shard = setup(mesh)
    out, eye = run(shard.requires_grad_()), torch.eye(3).double()
    words = re.escape("cannot batch the collectives of unit '(root)' on 2 ranks: use torch.vmap over the cotangents")
    with pytest.raises(RuntimeError, match=words):
        torch.autograd.grad(out, shard, eye, is_grads_batched=True, retain_graph=True)
    rows = torch.stack([torch.autograd.grad(out, shard, row, retain_graph=True)[0] for row in eye])
    pullback = torch.func.vjp(run, shard.detach())[1]
    close(torch.vmap(pullback)(eye)[0], rows)
    close(torch.func.jacrev(run)(shard.detach()), rows)


def test_torchs_older_vmap_is_refused_and_what_to_use_works():
    run_simulated(batched, 2)


def test_on_one_rank_torchs_older_vmap_works():
    run, shard = setup(fs.Mesh())
    out, eye = run(shard.requires_grad_()), torch.eye(3).double()
    (rows,) = torch.autograd.grad(out, shard, eye, is_grads_batched=True)
    close(rows, torch.func.jacrev(run)(shard.detach()))


def test_leaves_are_those_of_the_plan():
    run, shard = setup(fs.Mesh(), f=lambda leaves, x: leaves)
    close(tree.map(torch.Tensor.detach, run(shard.requires_grad_())), PARAMS)
