"""The mistakes of a first day that once gave wrong numbers without a word."""

import copy

import torch

import funcshard as fs
from tests.misuse import BUFFERS, EVERYWHERE, NET, Table, right, set_up, trained, untold

CASES = Table()
ONES = torch.ones(3)

# --- the world of a mean --------------------------------------------------------------------------

CASES += [
    ("value_and_grad psum", "a loss of psum terms alone", right(lambda: 2 * ONES),
     lambda mesh: fs.value_and_grad(lambda w: fs.psum(w**2, mesh).sum())(ONES)[1]),
    ("accumulate", "parameters that nothing sharded, in micro-batches",
     ValueError("For each rank's own variables pass mesh=mesh"),
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


def one_step(s):
    step = s.step()
    return s.whole(step(step.init(s.shards, BUFFERS), s.x)[0].shards)


# --- frozen leaves, and losses without a gradient -------------------------------------------------


def frozen_plan(mesh):
    return fs.make_plan(fs.make_functional(copy.deepcopy(NET).requires_grad_(False))[1], mesh)


CASES += [
    ("make_train_step", "a module that is frozen as a whole", ValueError("a training step needs a trainable leaf"),
     lambda mesh: fs.make_train_step(lambda s, b, x: x, fs.torch_optimizer(torch.optim.SGD), frozen_plan(mesh), mesh)),
    ("value_and_grad", "a loss under no_grad", ValueError("found one without a gradient, e.g. under no_grad"),
     lambda s: fs.value_and_grad(torch.no_grad()(s.loss))(s.shards, s.x)),
    ("from_state_dict", "another file on each rank", ValueError("must have the same values on every rank"),
     lambda mesh: fs.from_state_dict({"w": ONES + mesh.rank}, fs.make_plan({"w": ONES}, mesh), mesh), EVERYWHERE),
]  # fmt: skip
