"""Recipes with transforms over shards: ensembles, learning to learn, and solving with the Hessian."""

import pytest
import torch
import torchopt
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import run_simulated
from tests.storages import Alive

# The first use of forward-mode AD makes torch import a file that calls a deprecated function of
# torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

WORLDS = [1, 2, 4]
SAMPLES = 8


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def random(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, Y = random(1, SAMPLES, 3), random(2, SAMPLES, 1)


def setup(mesh, seed=0, strategy="full_shard"):
    apply, params, _ = fs.make_functional(build(seed))
    plan = fs.make_plan(params, mesh, units=["0", "2"], strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss(shards, x, y):
        return (sharded(shards, {}, x) - y).square().mean()

    return loss, fs.shard(params, plan, mesh), plan, params


def own(x, mesh):
    return x.chunk(mesh.world_size)[mesh.rank]


def whole_loss(params, x, y):
    out = torch.tanh(x @ params["0.weight"].T + params["0.bias"]) @ params["2.weight"].T + params["2.bias"]
    return (out - y).square().mean()


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


OPTIMIZERS = {
    "torch_optimizer": lambda: fs.torch_optimizer(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "torchopt": lambda: torchopt.adam(0.05),
}


def ensemble(mesh, optimizer):
    """Train three models at once and one after another, and compare them."""
    make, models, steps = OPTIMIZERS[optimizer], range(3), 4
    loss, _, plan, _ = setup(mesh)
    each = [setup(mesh, seed)[1] for seed in models]
    x, y = own(X, mesh), own(Y, mesh)

    def of_all(stack):
        losses = torch.vmap(loss, (0, None, None))(stack, x, y)
        return losses.sum(), losses

    alone = []
    for seed in models:
        step = fs.make_train_step(lambda shards, _, batch: loss(shards, *batch), make(), plan, mesh)
        state = step.init(setup(mesh, seed)[1], {})
        for _ in range(steps):
            state, metrics = step(state, (x, y))
        alone.append((state.shards, metrics["loss"]))

    stack = tree.map(lambda *shards: torch.stack(shards), *each)
    step = fs.make_train_step(lambda shards, _, __: of_all(shards), make(), plan, mesh, has_aux=True)
    state = step.init(stack, {})
    with fs.record_events() as events:
        for _ in range(steps):
            state, metrics = step(state, None)
    for i, (shards, last) in enumerate(alone):
        close(tree.map(lambda stacked, i=i: stacked[i], state.shards), shards)
        close(fs.pmean(metrics["aux"][i], mesh), last)
    return [(event.kind, event.unit) for event in events if event.unit]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", WORLDS)
def test_an_ensemble_is_trained_at_once_as_one_by_one(world, optimizer):
    for events in run_simulated(ensemble, world, optimizer):
        # each collective serves all three models
        once = [("all_gather", "0"), ("all_gather", "2"), ("reduce_scatter", "2"), ("reduce_scatter", "0")]
        assert events == (once * 4 if world > 1 else [])


def maml(mesh, form):
    """Compare the gradient of a loss on one half of the data through three inner steps on the other half."""
    loss, shards, plan, params = setup(mesh)
    x, y = own(X, mesh).chunk(2), own(Y, mesh).chunk(2)
    rate, n, inner = 0.3, mesh.world_size, 3

    if form == "torch.func":

        def after(shards):
            for _ in range(inner):
                grads = torch.func.grad(loss)(shards, x[0], y[0])
                shards = tree.map(lambda s, g: s - rate * g / n, shards, grads)
            return loss(shards, x[1], y[1])

        grads = tree.map(lambda g: g / n, torch.func.grad(after)(shards))
    else:

        def after(shards):
            for _ in range(inner):
                leaves, unflatten = tree.flatten(shards)
                found = torch.autograd.grad(loss(shards, x[0], y[0]), leaves, create_graph=True)
                shards = unflatten([s - rate * g / n for s, g in zip(leaves, found, strict=True)])
            return loss(shards, x[1], y[1])

        grads = fs.value_and_grad(after)(shards)[1]

    def of_all(p, i):
        return sum(whole_loss(p, a.chunk(2)[i], b.chunk(2)[i]) for a, b in zip(X.chunk(n), Y.chunk(n), strict=True))

    def whole_after(p):
        for _ in range(inner):
            g = torch.func.grad(lambda p: of_all(p, 0) / n)(p)
            p = tree.map(lambda a, b: a - rate * b, p, g)
        return of_all(p, 1) / n

    close(fs.gather(grads, plan, mesh), torch.func.grad(whole_after)(params))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch.func", "autograd"])
@pytest.mark.parametrize("world", WORLDS)
def test_learning_to_learn_differentiates_through_inner_steps(world, form):
    run_simulated(maml, world, form)


def product(loss, shards, mesh):
    """Return the function ``v -> (H + I) v``, with H the Hessian of the mean loss; vectors are trees like shards."""

    def multiply(v):
        (hv,) = torch.func.jvp(torch.func.grad(loss), (shards,), (v,))[1:]
        return tree.map(lambda h, v: h / mesh.world_size + v, hv, v)

    return multiply


def dot(a, b, plan, mesh):
    """Return the inner product of whole vectors: each slice counts once, however many ranks hold a copy."""
    return fs.psum(
        sum(
            a[unit.name][buffer.key] @ b[unit.name][buffer.key] * (buffer.shards / mesh.world_size)
            for unit in plan.units.values()
            for buffer in unit.buffers
        ),
        mesh,
    )


def conjugate_gradients(multiply, b, inner, steps):
    x, r, p = tree.map(torch.zeros_like, b), b, b
    rr = inner(r, r)
    for _ in range(steps):
        q = multiply(p)
        alpha = rr / inner(p, q)
        x = tree.map(lambda x, p, a=alpha: x + a * p, x, p)
        r = tree.map(lambda r, q, a=alpha: r - a * q, r, q)
        rr, before = inner(r, r), rr
        p = tree.map(lambda r, p, beta=rr / before: r + beta * p, r, p)
    return x


def influence(mesh, strategy="full_shard"):
    loss, shards, plan, params = setup(mesh, strategy=strategy)

    def mean(s):
        return loss(s, own(X, mesh), own(Y, mesh))

    b = fs.shard({name: random(i, *p.shape) for i, (name, p) in enumerate(params.items())}, plan, mesh)
    x = conjugate_gradients(product(mean, shards, mesh), b, lambda a, b: dot(a, b, plan, mesh), 30)

    def flat(p):
        return torch.cat([p[name].flatten() for name in params])

    hessian = torch.func.hessian(lambda p: whole_loss(p, X, Y))(params)
    rows = [torch.cat([hessian[a][b].reshape(params[a].numel(), -1) for b in params], 1) for a in params]
    matrix = torch.cat(rows) + torch.eye(sum(p.numel() for p in params.values())).double()
    found = flat(fs.gather(x, plan, mesh))
    close(matrix @ found, flat(fs.gather(b, plan, mesh)), 1e-8)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "strategy"),
    [(1, "full_shard"), (4, "full_shard"), ({"replicate": 2, "shard": 2}, "full_shard"), (2, "no_shard")],
)
def test_conjugate_gradients_solve_with_the_hessian(world, strategy):
    first, *others = fs.simulate(lambda mesh: influence(mesh, strategy), world)
    assert all(torch.equal(first, other) for other in others)


def forward_over_reverse(loss, shards, v):
    return torch.func.jvp(torch.func.grad(loss), (shards,), (v,))[1]


def reverse_over_reverse(loss, shards, v):
    def along(s):
        return sum((a * b).sum() for a, b in zip(tree.leaves(torch.func.grad(loss)(s)), tree.leaves(v), strict=True))

    return torch.func.grad(along)(shards)


def most_of_a_units_size(product_of, units, wrap, numel=64):
    """Return the largest number of tensors of a whole unit's size on a rank during a product with the Hessian."""
    params = {f"u{i:02}": {"w": random(i, numel)} for i in range(units)}

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["u*"])
        shards = fs.shard(params, plan, mesh)
        use = lambda leaves, x: torch.tanh(leaves["w"] * x).mean() + x  # noqa: E731
        runs = {name: wrap(fs.unshard(use, unit, mesh)) for name, unit in plan.units.items()}

        def loss(s):
            x = torch.ones((), dtype=torch.float64)
            for name, run in runs.items():
                x = run(s[name], x)
            return x.square()

        v = tree.map(torch.ones_like, shards)
        with Alive(lambda nbytes: nbytes >= numel * 8) as alive:
            hv = product_of(loss, shards, v)
        assert {leaf.numel() for leaf in tree.leaves(hv)} == {numel // mesh.world_size}
        return alive.most

    return max(fs.simulate(main, 4))


@pytest.mark.slow
@pytest.mark.parametrize("product_of", [forward_over_reverse, reverse_over_reverse])
def test_a_product_with_remat_holds_units_in_use_only_however_many_there_are(product_of):
    few, many = (most_of_a_units_size(product_of, units, fs.remat) for units in (4, 12))
    assert few == many
    assert many < most_of_a_units_size(product_of, 12, lambda f: f) / 5
