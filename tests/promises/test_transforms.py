"""torch.func over sharded parameters: each transform against plain torch on the whole parameters and batch.

Reductions add over ranks. Let L_r be the loss of rank r as a function of the whole parameters. A
transform that computes gradients with respect to parameters returns this rank's slice of the sum
over r. A transform that takes tangents of parameters returns this rank's own value.
"""

import contextlib
import functools
import warnings

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from funcshard.core.flat_buffer import ravel
from tests.core.units import forward_mode, random
from tests.ranks import run_ranks, run_simulated

pytestmark = forward_mode

HYBRID = {"replicate": 2, "shard": 2}
CASES = [(strategy, world) for strategy in ("full_shard", "shard_grad_op", "no_shard") for world in (1, 2, 4, HYBRID)]
SAMPLES = 8


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


X, DX = random(1, SAMPLES, 3), random(2, SAMPLES, 3)


class World:
    """One rank's shards and functions of the shards, and the same functions of the whole parameters."""

    def __init__(self, mesh, strategy):
        self.mesh, self.n = mesh, mesh.world_size
        apply, self.params, _ = fs.make_functional(build())
        self.plan = fs.make_plan(self.params, mesh, units=["0", "2"], strategy=strategy)
        self.shards = fs.shard(self.params, self.plan, mesh)
        self.tangents = {name: random(i, *p.shape) for i, (name, p) in enumerate(self.params.items())}
        self.v = fs.shard(self.tangents, self.plan, mesh)
        self.is_cut = self.plan.units["0"].sharded and mesh.shard.size > 1
        # Where a second derivative by a loop is refused: the first collective that it reaches.
        self.place = "(the gradient of )?unit '[02]', cut over [24] ranks"
        self.parts = X.chunk(self.n)
        self.x, self.dx = self.parts[mesh.rank], DX.chunk(self.n)[mesh.rank]
        self.c = random(3 + mesh.rank, *self.whole(self.params, self.x).shape)
        run = fs.fully_shard(apply, self.plan, mesh)
        self.out = lambda shards, x: run(shards, {}, x)

    @staticmethod
    def whole(params, x):
        return torch.tanh(x @ params["0.weight"].T + params["0.bias"]) @ params["2.weight"].T + params["2.bias"]

    def loss(self, shards, x=None):
        return self.out(shards, self.x if x is None else x).square().mean()

    def whole_loss(self, params, x=None):
        return self.whole(params, self.x if x is None else x).square().mean()

    def summed(self, function):
        """Return the sum over ranks of ``function(rank, inputs of that rank)``, whose results are trees like params."""
        return functools.reduce(lambda a, b: tree.map(torch.add, a, b), [function(r, x) for r, x in enumerate(self.parts)])

    def gathered(self, shards):
        return fs.gather(shards, self.plan, self.mesh)

    def basis(self):
        """Return one basis vector like params for each of their elements, stacked; and the same vectors, sharded."""
        numel = sum(p.numel() for p in self.params.values())
        eye = torch.eye(numel, dtype=torch.float64).split([p.numel() for p in self.params.values()], 1)
        whole = {name: e.reshape(numel, *p.shape) for e, (name, p) in zip(eye, self.params.items(), strict=True)}
        return whole, self.cut(whole)

    def cut(self, stacked):
        """Return this rank's shards of trees like params that are stacked along dim 0."""
        rows = zip(*stacked.values(), strict=True)
        shards = [fs.shard(dict(zip(stacked, row, strict=True)), self.plan, self.mesh) for row in rows]
        return tree.map(lambda *parts: torch.stack(parts), *shards)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def dot(a, b):
    return sum((x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def value_and_grad(w):
    """Both return this rank's loss; torch.func returns the sum of the ranks' gradients, and fs their mean."""
    grads, value = torch.func.grad_and_value(w.loss)(w.shards)
    mine, mean = fs.value_and_grad(w.loss)(w.shards)
    close((value, mine), (w.whole_loss(w.params),) * 2)
    close(w.gathered(grads), tree.map(lambda g: g * w.n, w.gathered(mean)))
    close(w.gathered(mean), torch.func.grad(lambda p: w.whole(p, X).square().mean())(w.params))


def vjp(w):
    """For parameters, the sum over ranks of cotangents times Jacobian; for inputs, this rank's own product."""
    out, pullback = torch.func.vjp(w.out, w.shards, w.x)
    by_shards, by_x = pullback(w.c)
    close(out, w.whole(w.params, w.x))
    pull = torch.func.vjp(lambda x: w.whole(w.params, x), w.x)[1]
    close(by_x, pull(w.c)[0])

    def cotangent(r):
        return random(3 + r, *w.c.shape)

    expected = w.summed(lambda r, x: torch.func.vjp(lambda p: w.whole(p, x), w.params)[1](cotangent(r))[0])
    close(w.gathered(by_shards), expected)


def jvp(w):
    """The derivative of this rank's output along its own inputs' tangent, and the whole one, of which it holds a shard."""
    of_parameters = lambda f, p, v: torch.func.jvp(lambda p: f(p, w.x), (p,), (v,))  # noqa: E731
    of_inputs = lambda f, p, v: torch.func.jvp(lambda x: f(p, x), (w.x,), (w.dx,))  # noqa: E731
    of_both = lambda f, p, v: torch.func.jvp(f, (p, w.x), (v, w.dx))  # noqa: E731
    for along in (of_parameters, of_inputs, of_both):
        close(along(w.out, w.shards, w.v), along(w.whole, w.params, w.tangents))


def jvp_of_jvp(w):
    """The second derivative of this rank's loss along the whole tangent, twice."""

    def twice(f):
        return lambda s, v: torch.func.jvp(lambda s: torch.func.jvp(f, (s,), (v,))[1], (s,), (v,))[1]

    close(twice(w.loss)(w.shards, w.v), twice(w.whole_loss)(w.params, w.tangents))


def jacrev(w):
    """Row i is the sum over ranks of the gradients of the i-th outputs."""
    found = torch.func.jacrev(lambda s: w.out(s, w.x).mean(0))(w.shards)
    rows = [w.gathered(tree.map(lambda j, i=i: j[i].contiguous(), found)) for i in range(2)]
    expected = w.summed(lambda _, x: torch.func.jacrev(lambda p: w.whole(p, x).mean(0))(w.params))
    close(tree.map(lambda *r: torch.stack(r), *rows), expected)


def jacfwd(w):
    """This rank's own Jacobian if nothing is cut; otherwise an error, because columns of all ranks would be added."""
    if w.is_cut:
        with pytest.raises(RuntimeError, match=r"torch.func.jacfwd, .* would mix columns at unit '0', cut over [24] ranks"):
            torch.func.jacfwd(lambda s: w.out(s, w.x).mean(0))(w.shards)
        return
    found = torch.func.jacfwd(lambda s: w.out(s, w.x).mean(0))(w.shards)
    whole = torch.func.jacrev(lambda p: w.whole(p, w.x).mean(0))(w.params)
    for unit in w.plan.unit_list:
        (buffer,) = unit.buffers
        rows = [ravel([whole[leaf.path][i] for leaf in buffer.leaves], buffer) for i in range(2)]
        close(found[unit.name][buffer.key], torch.stack(rows))


def jacfwd_along_the_worlds_basis(w):
    """With a basis of the whole parameters as tangents, every column of this rank's Jacobian is computed."""
    whole, sharded = w.basis()

    def push(f, at):
        return torch.vmap(lambda v: torch.func.jvp(f, (at,), (v,))[1])

    found = push(lambda s: w.out(s, w.x), w.shards)(sharded)
    close(found, push(lambda p: w.whole(p, w.x), w.params)(whole))


def jacobians_of_inputs(w):
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        ours, plain = lambda x: w.out(w.shards, x).sum(0), lambda x: w.whole(w.params, x).sum(0)
        close(transform(ours)(w.x), transform(plain)(w.x))


def hvp(w):
    return w.summed(
        lambda _, x: torch.func.jvp(lambda p: torch.func.grad(w.whole_loss)(p, x), (w.params,), (w.tangents,))[1]
    )


def hvp_in_every_order(w):
    """The sum of the ranks' Hessians times the vector whose shards the ranks hold."""
    forward_over_reverse = torch.func.jvp(torch.func.grad(w.loss), (w.shards,), (w.v,))[1]
    reverse_over_reverse = torch.func.grad(lambda s: dot(torch.func.grad(w.loss)(s), w.v))(w.shards)
    reverse_over_forward = torch.func.grad(lambda s: torch.func.jvp(w.loss, (s,), (w.v,))[1])(w.shards)
    for product in (forward_over_reverse, reverse_over_reverse, reverse_over_forward):
        close(w.gathered(product), hvp(w))


def hessian(w):
    """Hessian-vector products along a basis of the whole parameters: this rank's slice of the sum of Hessians."""
    whole, sharded = w.basis()
    found = torch.vmap(lambda v: torch.func.jvp(torch.func.grad(w.loss), (w.shards,), (v,))[1])(sharded)

    def product(x):
        return torch.vmap(lambda v: torch.func.jvp(lambda p: torch.func.grad(w.whole_loss)(p, x), (w.params,), (v,))[1])(
            whole
        )

    expected = w.summed(lambda _, x: product(x))
    close(found, w.cut(expected))


def hessian_by_torch(w):
    """The sum of the ranks' Hessians if nothing is cut; otherwise an error, in every order of reverse and forward."""
    reverse_twice = torch.func.jacrev(torch.func.grad(w.loss))
    if w.is_cut:
        for transform, what in ((torch.func.hessian(w.loss), "columns"), (reverse_twice, "rows")):
            with pytest.raises(RuntimeError, match=f"would mix {what} at {w.place}"):
                transform(w.shards)
        return
    found = torch.func.hessian(w.loss)(w.shards)
    close(reverse_twice(w.shards), found)
    expected = w.summed(lambda _, x: torch.func.hessian(lambda p: w.whole_loss(p, x))(w.params))
    for unit in w.plan.unit_list:
        for other in w.plan.unit_list:
            (buffer,), (along,) = unit.buffers, other.buffers
            block = torch.cat([
                torch.cat([expected[a.path][b.path].reshape(a.numel, b.numel) for b in along.leaves], 1)
                for a in buffer.leaves
            ])  # fmt: skip
            close(found[unit.name][buffer.key][other.name][along.key], block)


def functional_hessian(w):
    """torch.autograd.functional loops like torch.func.hessian, and is refused in the same cases."""
    leaves, unflatten = tree.flatten(w.shards)
    context = (
        pytest.raises(RuntimeError, match=f"torch.autograd.functional.jacobian, .* would mix rows at {w.place}")
        if w.is_cut
        else contextlib.nullcontext()
    )
    with context:
        found = torch.autograd.functional.hessian(lambda *leaves: w.loss(unflatten(leaves)), tuple(leaves))
        expected = torch.func.hessian(w.loss)(w.shards)
        close([block for row in found for block in row], tree.leaves(expected))


def functional_hvp(w):
    """hvp and vhp along the vector whose shards the ranks hold are the Hessian-vector product above."""
    leaves, unflatten = tree.flatten(w.shards)
    for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        found = product(lambda *leaves: w.loss(unflatten(leaves)), tuple(leaves), tuple(tree.leaves(w.v)))[1]
        close(w.gathered(unflatten(found)), hvp(w))


def psum_of_inputs(w):
    """A psum inside a loop over unit vectors adds derivatives by all ranks' inputs, so it is an error on several ranks."""
    mean = lambda x: fs.pmean(w.out(w.shards, x).sum(0), w.mesh)  # noqa: E731
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match="at psum or pmean") if w.n > 1 else contextlib.nullcontext():
            close(transform(mean)(w.x), transform(lambda x: w.whole(w.params, x).sum(0))(w.x))


def vmap_over_inputs(w):
    """One all-gather of each unit serves all samples."""
    with fs.record_events() as events:
        found = torch.vmap(w.out, in_dims=(None, 0))(w.shards, w.x)
    close(found, w.whole(w.params, w.x))
    gathers = [event.kind for event in events if event.unit is not None]
    assert gathers == ["all_gather"] * sum(len(unit.buffers) for unit in w.plan.unit_list if w.is_cut)
    assert len(events) == len(gathers)


def vmap_of_grad(w):
    """Gradient i is the sum over ranks of the gradients of their i-th samples; see fs.per_sample_grad for each alone."""
    found = torch.vmap(torch.func.grad(w.loss), in_dims=(None, 0))(w.shards, w.x)
    for i in range(len(w.x)):
        row = w.gathered(tree.map(lambda g, i=i: g[i].contiguous(), found))
        close(row, w.summed(lambda _, x, i=i: torch.func.grad(w.whole_loss)(w.params, x[i])))


def double_backward(w):
    """Plain autograd, twice: the gradient of the squared norm of the sum of gradients."""
    shards = tree.map(lambda s: s.detach().requires_grad_(), w.shards)
    leaves, unflatten = tree.flatten(shards)
    first = torch.autograd.grad(w.loss(shards), leaves, create_graph=True)
    second = unflatten(torch.autograd.grad(dot(first, first), leaves))

    def norm(p):
        return dot(*[w.summed(lambda _, x: torch.func.grad(w.whole_loss)(p, x))] * 2)

    close(w.gathered(second), torch.func.grad(norm)(w.params))


def linearize(w):
    """torch.func.linearize works without collectives; with them, which its graph would leave out, it raises an error."""
    moves = any(unit.sharded and w.mesh.shard.size > 1 for unit in w.plan.unit_list)
    expected = (
        pytest.raises(RuntimeError, match=r"would leave out the collectives of unit '0' on .* call torch.func.jvp")
        if moves
        else contextlib.nullcontext()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a warning of torch about constants in its own graph
        with expected:
            _, push = torch.func.linearize(w.loss, w.shards)
            close(push(w.v), torch.func.jvp(w.whole_loss, (w.params,), (w.tangents,))[1])


TRANSFORMS = (
    value_and_grad, vjp, jvp, jvp_of_jvp, jacrev, jacfwd, jacfwd_along_the_worlds_basis, jacobians_of_inputs,
    hvp_in_every_order, hessian, hessian_by_torch, functional_hessian, functional_hvp, psum_of_inputs, vmap_over_inputs,
    vmap_of_grad, double_backward,
)  # fmt: skip


def check(mesh, strategy, transforms=TRANSFORMS):
    world = World(mesh, strategy)
    for transform in transforms:
        try:
            transform(world)
        except Exception as error:
            error.add_note(f"in {transform.__name__}")
            raise


def run_all(run, strategy, world, *args):
    shape = world if isinstance(world, dict) else None
    run(check, 4 if shape else world, strategy, *args, shape=shape, timeout=150)


@pytest.mark.nightly(one_in=8)
@pytest.mark.parametrize(("strategy", "world"), CASES, ids=lambda x: str(x).replace("'", ""))
def test_transforms_of_shards_are_those_of_the_whole(strategy, world):
    run_all(run_simulated, strategy, world)


@pytest.mark.nightly
def test_the_same_on_real_ranks():
    run_all(run_ranks, "full_shard", 2)
    run_all(run_ranks, "shard_grad_op", HYBRID)


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize(("strategy", "world"), [("full_shard", 2), ("no_shard", 2), ("full_shard", 1)])
def test_linearize_on_real_ranks_works_or_says_why_not(strategy, world):
    run_all(run_ranks, strategy, world, (linearize,))
