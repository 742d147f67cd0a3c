"""The mistakes of a first day that once gave wrong numbers without a word."""

import copy
import functools

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import funcshard as fs
from tests.misuse import BUFFERS, DATA, EVERYWHERE, NET, Table, right, set_up, trained, untold, values, whole_grads

CASES = Table()
ONES = torch.ones(3)

# --- the world of a mean --------------------------------------------------------------------------

CASES += [
    ("value_and_grad psum", "a loss of psum terms alone", right(lambda: 2 * ONES),
     lambda mesh: fs.value_and_grad(lambda w: fs.psum(w**2, mesh).sum())(ONES)[1]),
    ("value_and_grad", "parameters that nothing sharded", ValueError("mesh=fs.Mesh() for this rank alone"),
     lambda mesh: fs.value_and_grad(lambda w: (w * (mesh.rank + 1)).sum())(ONES), EVERYWHERE),
    ("accumulate", "parameters that nothing sharded, in micro-batches",
     ValueError("pass mesh=mesh if each rank's tensors are variables of their own"),
     lambda mesh: fs.accumulate(lambda w, x: (w * x).sum(), 2)(ONES, torch.ones(2, 3))),
    ("value_and_grad", "copies of one model that nothing sharded, with a mesh",
     untold("docs/gradients.md", "and the copies drift apart", lambda: ONES * 2),
     lambda mesh: fs.value_and_grad(lambda w: (w * 2).sum(), mesh=mesh)(ONES)[1]),
    ("value_and_grad", "a penalty on the shard that is not zero at zero",
     untold("docs/gradients.md", "A direct term sees the padding at the end of the last shards.", 0.0),
     lambda mesh: penalised_padding(mesh)),
    ("value_and_grad", "a weight with a gradient", ValueError("return weight.detach()"),
     lambda s: fs.value_and_grad(lambda *args: (s.loss(*args),) * 2, weighted=True)(s.shards, s.x)),
    ("init_mesh", "inside simulate, instead of the mesh of the rank", right(lambda: trained()),
     lambda mesh: one_step(set_up(fs.init_mesh()))),
]  # fmt: skip


def penalised_padding(mesh):
    params = {"w": torch.ones(2 * mesh.shard.size - 1)}  # the last place of the last shard is padding
    plan = fs.make_plan(params, mesh)
    penalty = lambda s: fs.psum((s[""]["float32"] - 1).square().sum(), mesh)  # noqa: E731
    return fs.value_and_grad(penalty)(fs.shard(params, plan, mesh))[0].item()  # each leaf is one


def one_step(s, **options):
    step = s.step(**options)
    return s.whole(step(step.init(s.shards, BUFFERS), s.x)[0].shards)


# --- frozen leaves, and losses without a gradient -------------------------------------------------


def of_frozen(net, mesh):
    apply, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["0"])
    sharded = fs.fully_shard(apply, plan, mesh)
    return plan, fs.shard(params, plan, mesh), lambda shards: sharded(shards, {}, DATA).square().mean()


@CASES("make_functional value_and_grad", "a module that is frozen as a whole", ValueError("from frozen leaves only"))
def _(mesh):
    _, shards, loss = of_frozen(copy.deepcopy(NET).requires_grad_(False), mesh)
    fs.value_and_grad(loss)(shards)


@CASES("make_train_step", "a module that is frozen as a whole", ValueError("a training step needs a trainable leaf"))
def _(mesh):
    plan, _, loss = of_frozen(copy.deepcopy(NET).requires_grad_(False), mesh)
    fs.make_train_step(lambda s, b, x: loss(s), fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh)


@CASES("value_and_grad", "a loss under no_grad", ValueError("it was computed under no_grad"))
def _(mesh):
    s = set_up(mesh)
    fs.value_and_grad(torch.no_grad()(s.loss))(s.shards, s.x)


CASES += [
    ("per_sample_grad", "a detached loss", ValueError("a loss that no gradient leaves"),
     lambda s: fs.per_sample_grad(lambda shards, x: s.loss(shards, x).detach(), s.plan, s.mesh)(s.shards, s.x)),
]  # fmt: skip


@CASES("make_functional", "statistics of BatchNorm that are thrown away", UserWarning("use make_functional(module, mutable"))
def _(mesh):
    apply, params, buffers = fs.make_functional(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    plan = fs.make_plan(params, mesh)
    fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), buffers, DATA)


# --- donated states -------------------------------------------------------------------------------


@CASES("make_train_step TrainState", "the best state, kept without a copy", RuntimeError("keep fs.copy(state)"))
def _(mesh):
    s = set_up(mesh)
    step = s.step()
    best = step.init(s.shards, BUFFERS)
    step(best, s.x)
    s.whole(best.shards)


@CASES("make_train_step", "two experiments from one set of shards", RuntimeError("or pass donate=False"))
def _(mesh):
    s = set_up(mesh)
    one_step(s)
    one_step(s)


@CASES("torch_optimizer", "the optimizer's state not taken back", RuntimeError("this optimizer state was donated"))
def _(mesh):
    s = set_up(mesh)
    optimizer = fs.torch_optimizer(torch.optim.AdamW)
    shards, state = fs.copy(s.shards), optimizer.init(s.shards)
    for _ in range(2):
        shards, _ = optimizer.step(s.shards, state, shards)


@CASES("copy make_train_step", "two experiments from copies", right(lambda: [trained(), trained()]))
def _(mesh):
    s = set_up(mesh)
    step, state = s.step(), s.step().init(s.shards, BUFFERS)
    other = fs.copy(state)
    return [s.whole(step(each, s.x)[0].shards) for each in (state, other)]


@CASES("copy", "a copy of a state that is gone", RuntimeError("was donated to a training step"))
def _(mesh):
    s = set_up(mesh)
    step, state = s.step(), s.step().init(s.shards, BUFFERS)
    step(state, s.x)
    fs.copy(state)


CASES += [
    ("copy", "the states of two models at once", right(lambda: [values()] * 2), lambda s: copies_of(s)),
]  # fmt: skip


def copies_of(s):
    kept = fs.copy([s.shards, s.shards])
    one_step(s)
    return [s.whole(shards) for shards in kept]


# --- ranks that begin apart -----------------------------------------------------------------------


def of_this_rank(mesh):
    torch.manual_seed(mesh.rank)
    return {"w": torch.randn(5, 3)}


CASES += [
    ("shard", "a model that each rank seeded with its number",
     ValueError("leaf 'w' of params must have the same values on every rank"),
     lambda mesh: fs.shard(params := of_this_rank(mesh), fs.make_plan(params, mesh, strategy="no_shard"), mesh)),
    ("init_shards", "values drawn by the number of the rank",
     ValueError("leaf 'w' of init(unit) must have the same values on every rank"),
     lambda mesh: fs.init_shards(lambda unit: {"w": ONES + mesh.rank}, fs.make_plan({"w": ONES}, mesh), mesh), EVERYWHERE),
    ("from_state_dict", "another file on each rank", ValueError("must have the same values on every rank"),
     lambda mesh: fs.from_state_dict({"w": ONES + mesh.rank}, fs.make_plan({"w": ONES}, mesh), mesh), EVERYWHERE),
]  # fmt: skip

# --- transforms -----------------------------------------------------------------------------------

CASES += [
    ("fully_shard", "torch.func.hessian over shards",
     RuntimeError("would mix rows at the gradient of unit", "would mix columns at"),
     lambda s: torch.func.hessian(lambda shards: s.loss(shards, s.x))(s.shards)),
    ("psum", "inside torch.func.jacrev", RuntimeError("take psum of the transform's result"),
     lambda mesh: torch.func.jacrev(lambda x: fs.psum(x**2, mesh))(ONES)),
]  # fmt: skip

# --- changes that come too late -------------------------------------------------------------------


@CASES("reshard", "shards written to between forward and backward", RuntimeError("update shards after backward"))
def _(mesh):
    s = set_up(mesh)
    shards = {unit: {key: shard.requires_grad_() for key, shard in own.items()} for unit, own in s.shards.items()}
    loss = s.loss(shards, s.x)
    with torch.no_grad():
        shards["2"]["float32"].mul_(2)
    loss.backward()


# --- what users of FSDP2 rely on ------------------------------------------------------------------


class Selective(nn.Module):
    """Runs a module under a selective checkpoint that keeps the results of matrix products."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        policy = lambda _, op, *args, **kwargs: (  # noqa: E731
            CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE
        )
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)


@CASES("fully_shard", "a selective activation checkpoint inside a unit", right(whole_grads))
def _(mesh):
    apply, params, _ = fs.make_functional(Selective(copy.deepcopy(NET)))
    plan = fs.make_plan(params, mesh, units=["inner.0", "inner.2"])
    sharded = fs.fully_shard(apply, plan, mesh)
    x = DATA.chunk(mesh.world_size)[mesh.rank]
    loss = lambda shards: sharded(shards, {}, x).square().mean()  # noqa: E731
    grads = fs.gather(fs.value_and_grad(loss)(fs.shard(params, plan, mesh))[1], plan, mesh)
    return {name.removeprefix("inner."): grad for name, grad in grads.items()}


def two(x):
    return TwoTensor(x, x.clone())


CASES += [
    ("make_plan", "a leaf of a tensor subclass", TypeError("is a TwoTensor, a tensor class with operations of its own"),
     lambda mesh: fs.make_plan({"w": two(ONES)}, mesh)),
    ("from_state_dict to_state_dict", "the pieces of a rank that holds nothing of a leaf",
     right(lambda: {"w": torch.ones(4, 4), "b": torch.ones(1)}),
     lambda mesh: there_and_back(mesh, {"w": torch.ones(4, 4), "b": torch.ones(1)})),
]  # fmt: skip


def there_and_back(mesh, params):
    plan = fs.make_plan(params, mesh)
    pieces = fs.to_state_dict(fs.shard(params, plan, mesh), plan, mesh, sharded=True)
    return fs.gather(fs.from_state_dict(pieces, plan, mesh), plan, mesh)


def forward_through_a_global():
    net = copy.deepcopy(NET)
    scope = {"old": net.forward}
    exec("new = lambda x: old(x)", scope)
    net.forward = scope["new"]
    return net


CASES += [
    ("make_functional", "a forward replaced through a global", TypeError("a global variable"),
     lambda mesh: fs.make_functional(forward_through_a_global())),
    ("make_functional", "a graph of torch.fx", right(lambda: NET(DATA).detach()),
     lambda mesh: run_sharded(mesh, torch.fx.symbolic_trace(NET), ["0", "2"])),
    ("make_functional", "an embedding with max_norm",
     ValueError("has max_norm=1.0, so its forward writes to its parameter 'weight'"),
     lambda mesh: fs.make_functional(nn.Embedding(4, 4, max_norm=1.0))),
    ("fully_shard", "a deep copy of the sharded function", right(lambda: NET(DATA).detach()),
     lambda s: copy.deepcopy(s.sharded)(s.shards, BUFFERS, DATA).detach()),
]  # fmt: skip


def run_sharded(mesh, net, units):
    apply, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=units)
    return fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), {}, DATA).detach()


torch.manual_seed(1)
LAYER = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()


def evaluated():
    with torch.no_grad():
        return LAYER(DATA[None])


@CASES("fully_shard", "the fast path of a TransformerEncoderLayer", right(evaluated))
def _(mesh):
    apply, params, _ = fs.make_functional(LAYER)
    plan = fs.make_plan(params, mesh, units=["self_attn"])
    with torch.no_grad():
        return fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), {}, DATA[None])


# --- numbers --------------------------------------------------------------------------------------
