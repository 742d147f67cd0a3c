"""Outside of transforms too, one node makes the leaves of a buffer, and does what it does under torch.func."""

import re

import pytest
import torch
from torch.autograd import forward_ad

import funcshard as fs
from tests.core.units import by_hand, close, forward_mode
from tests.ranks import on_ranks, run_simulated
from tests.storages import Log

pytestmark = forward_mode

PARAMS = {"w": torch.linspace(-1, 1, 12).double().view(3, 4), "b": torch.linspace(0, 1, 3).double()}
STRATEGIES = pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
WORLDS = pytest.mark.parametrize("world", [1, 2])


def layer(leaves, x):
    return torch.tanh(leaves["w"] @ x + leaves["b"])


def setup(mesh, strategy="full_shard", f=layer):
    _, run, shards = by_hand(mesh, PARAMS, f, how=fs.reshard, strategy=strategy)
    x = torch.linspace(0, 1 + mesh.rank, 4).double()
    return lambda shard: run({"float64": shard}, x), shards[""]["float64"]


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
def test_backward_runs_several_times_and_twice_over(strategy):
    run_simulated(twice_and_again, 2, strategy)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_backward_runs_in_anomaly_mode():
    # Why around all ranks: the mode is the process's, and the rank that leaves it last would leave it on.
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        run_simulated(twice_and_again, 2, "full_shard")


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


@pytest.mark.usefixtures("without_garbage_collection")
@on_ranks(2)
def test_the_graph_of_a_gradient_is_freed_when_nothing_refers_to_it(mesh):
    log = Log()

    def f(leaves, x):
        log(leaves["w"])
        return layer(leaves, x)

    run, shard = setup(mesh, f=f)
    (first,) = torch.autograd.grad(run(shard.requires_grad_()).square().sum(), shard, create_graph=True)
    torch.autograd.grad(first.sum(), shard)
    del first
    assert (len(log), log.alive()) == (1, 0)


@WORLDS
@on_ranks()
def test_torchs_older_vmap_is_refused_on_several_ranks_and_what_to_use_works(mesh, world):
    run, shard = setup(mesh)
    out, eye = run(shard.requires_grad_()), torch.eye(3).double()
    ask = lambda: torch.autograd.grad(out, shard, eye, is_grads_batched=True, retain_graph=True)[0]  # noqa: E731
    rows = torch.stack([torch.autograd.grad(out, shard, row, retain_graph=True)[0] for row in eye])
    if mesh.world_size == 1:
        close(ask(), rows)
    else:
        words = re.escape("cannot batch the collectives of unit '(root)' on 2 ranks: use torch.vmap over the cotangents")
        with pytest.raises(RuntimeError, match=words):
            ask()
    pullback = torch.func.vjp(run, shard.detach())[1]
    close(torch.vmap(pullback)(eye)[0], rows)
    close(torch.func.jacrev(run)(shard.detach()), rows)
