"""The objective of value_and_grad: the mean over the ranks of which mesh, of losses with a gradient."""

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from tests.core.test_gradients import PARAMS, units_of
from tests.pairwise import crossed
from tests.ranks import on_ranks

# Name of a loss -> the loss of (this rank's w, mesh), and the same as a function of all ranks' w.
# The objective is the mean of the losses, so autograd over all ranks' leaves at once is the
# reference.
TERMS = {
    "psum": (lambda w, mesh: fs.psum(w**3, mesh).sum(), lambda every, r: sum(w**3 for w in every).sum()),
    "pmean": (lambda w, mesh: fs.pmean(w**3, mesh).sum(), lambda every, r: sum(w**3 for w in every).sum() / len(every)),
    "psum weighed by the rank": (
        lambda w, mesh: (mesh.rank + 1) * fs.psum(w**2, mesh).sum(),
        lambda every, r: (r + 1) * sum(w**2 for w in every).sum(),
    ),
    "psum and an own term": (
        lambda w, mesh: fs.psum(w**2, mesh).sum() + (mesh.rank + 1) * w.sin().sum(),
        lambda every, r: sum(w**2 for w in every).sum() + (r + 1) * every[r].sin().sum(),
    ),
}


@pytest.mark.slow
@crossed(given=["mesh given", "mesh found"], world=[1, 2, 3, {"replicate": 2, "shard": 2}], term=list(TERMS))
@on_ranks()
def test_a_loss_of_collectives_alone_has_the_gradient_of_the_mean_over_ranks(mesh, term, world, given):
    sharded, reference = TERMS[term]
    every = [torch.linspace(-1, 2, 4).double().add(rank).requires_grad_() for rank in range(mesh.world_size)]
    evaluate = fs.value_and_grad(lambda w: sharded(w, mesh), mesh=mesh if given == "mesh given" else None)
    losses = [reference(every, rank) for rank in range(mesh.world_size)]
    expected = torch.autograd.grad(sum(losses) / mesh.world_size, every)[mesh.rank]
    torch.testing.assert_close(evaluate(every[mesh.rank].detach()), (losses[mesh.rank].detach(), expected))


@pytest.mark.parametrize("micro_batches", [1, 2])
@on_ranks(2)
def test_unsharded_params_on_several_ranks_need_a_mesh(mesh, micro_batches):
    def grads(given=None, rank=mesh.rank):
        evaluate = fs.accumulate(lambda w, x: (w * x).sum(), micro_batches, mesh=given)
        return evaluate(torch.ones(2), torch.full((2, 1), rank + 1.0))[1].tolist()

    words = r"which of the 2 ranks: shard copies of one model.*for this rank alone mesh=fs.Mesh\(\)"
    with pytest.raises(ValueError, match=words):
        grads()
    own = 2 * (mesh.rank + 1.0) / micro_batches  # the mean over micro-batches of sums over their rows
    assert grads(fs.Mesh()) == [own] * 2
    assert grads(mesh) == [own / 2] * 2  # each rank's leaf is a variable of its own, on which only its own loss depends


@on_ranks({"replicate": 2, "shard": 2})
def test_a_psum_over_a_part_of_the_ranks_needs_the_mesh_of_the_mean(mesh):
    row = fs.Mesh({"shard": mesh.shard}, device=mesh.device)
    plan, shards, root, _ = units_of(mesh)
    loss_fn = lambda s: fs.psum(root(s[""], 1.0), row)  # noqa: E731
    with pytest.raises(ValueError, match=r"found meshes of \[2, 4\] ranks.*only psum or pmean runs over a part.*pass mesh="):
        fs.value_and_grad(loss_fn)(shards)
    with pytest.raises(ValueError, match=r"found units of other meshes than mesh=, of \[1, 4\] ranks"):
        fs.value_and_grad(lambda s: root(s[""], 1.0), mesh=fs.Mesh())(shards)
    # Two ranks of a row each hold the sum of both of their losses.
    grads = fs.gather(fs.value_and_grad(loss_fn, mesh=mesh)(shards)[1], plan, mesh)
    torch.testing.assert_close(grads["a"], torch.full((5,), 2.0))


@on_ranks(2)
def test_a_gradient_inside_a_loss_tells_the_world_of_the_loss_around_it(mesh):
    _, shards, root, _ = units_of(mesh)

    def outer(w):
        _, grads = fs.value_and_grad(lambda s: root(s[""], 1.0))(shards)
        return (w * grads[""]["float32"]).sum()

    found = fs.value_and_grad(outer)(torch.ones(3))[1].tolist()
    assert found == ([0.5, 0.5, 0.0] if mesh.rank else [0.5, 0.5, 0.5])


CONSTANTS = {
    "detached shards": lambda s, shards, root: root(tree.map(torch.Tensor.detach, s[""]), 1.0),
    "the shards of the scope around it": lambda s, shards, root: root(shards[""], 1.0),
    "another tensor's gradient only": lambda s, shards, root: root(shards[""], 1.0) * torch.ones((), requires_grad=True),
    "a number as a tensor": lambda s, shards, root: torch.tensor(root(s[""], 1.0).item()),
}


@pytest.mark.parametrize(("micro_batches", "reduce"), [(1, "each"), (2, "each"), (2, "once")])
@pytest.mark.parametrize("constant", CONSTANTS)
@on_ranks(2)
def test_a_loss_that_no_gradient_leaves_is_an_error_unless_it_is_allowed(mesh, constant, micro_batches, reduce):
    _, shards, root, _ = units_of(mesh)
    loss_fn = lambda s, *_: CONSTANTS[constant](s, shards, root)  # noqa: E731
    how, words = (
        {"mesh": mesh, "reduce": reduce},
        "depends on a trainable shard of its argument.*pass allow_constant=True for",
    )
    with pytest.raises(ValueError, match=words):
        fs.accumulate(loss_fn, micro_batches, **how)(shards, torch.ones(2))
    loss, grads = fs.accumulate(loss_fn, micro_batches, allow_constant=True, **how)(shards, torch.ones(2))
    torch.testing.assert_close(loss, PARAMS["a"].sum())
    assert not any(leaf.any() for leaf in tree.leaves(grads))
