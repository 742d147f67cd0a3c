"""Mistakes with optimizers, training steps and loss scaling."""

import copy

import torch

import funcshard as fs
from tests.misuse import BUFFERS, NET, set_up

SGD = torch.optim.SGD


def sgd(**options):
    return fs.torch_optimizer(SGD, **{"lr": 0.1, **options})


def stepped(s, optimizer=None, loss_fn=None, **options):
    """Return the full parameters after one step."""
    step = s.step(optimizer, loss_fn, **options)
    return s.whole(step(step.init(s.shards, BUFFERS), s.x)[0].shards)


def frozen_plan(mesh):
    return fs.make_plan(fs.make_functional(copy.deepcopy(NET).requires_grad_(False))[1], mesh)


def for_biases(plan, mesh):
    return sgd(groups=[{"paths": ["**.bias"], "lr": 1.0}], plan=plan, mesh=mesh)


COSINE = torch.optim.lr_scheduler.CosineAnnealingLR
SCALER = fs.GradScaler(init_scale=8.0)
ONES = {"w": torch.ones(2)}


CASES = [
    ("torch_optimizer", "groups without plan and mesh", ValueError("pass plan=plan and mesh=mesh"),
     lambda mesh: sgd(groups=[{"paths": ["0"], "lr": 1.0}])),
    ("torch_optimizer", "groups that overlap", ValueError("groups overlap"),
     lambda s: sgd(groups=[{"paths": ["0"]}, {"paths": ["**.bias"]}], plan=s.plan, mesh=s.mesh)),
    ("torch_optimizer", "groups of leaves that the plan lacks", ValueError("matches no part of the tree"),
     lambda s: sgd(groups=[{"paths": ["bias"]}], plan=s.plan, mesh=s.mesh)),
    ("torch_optimizer Mesh", "groups made for one rank", ValueError("found {'replicate': 1, 'shard': 1}"),
     lambda s: stepped(s, for_biases(s.plan, fs.Mesh()))),
    ("torch_optimizer make_train_step", "groups of a plan with other units", ValueError("with one plan"),
     lambda s: stepped(s, for_biases(set_up(s.mesh, units=[]).plan, s.mesh))),
    ("torch_schedule", "a scheduler instead of its class", TypeError("or a function; found CosineAnnealingLR"),
     lambda mesh: fs.torch_schedule(COSINE(SGD(NET.parameters(), lr=0.1), 4), lr=0.1)),
    ("make_meter", "tokens instead of the mesh", TypeError("call make_meter(mesh, tokens=...)"),
     lambda mesh: fs.make_meter(512)),
    ("make_meter", "the metrics before the state", TypeError("call meter(*step(state, batch))"),
     lambda s: fs.make_meter(s.mesh)({}, s.state())),
    ("muon", "a mesh of one rank", ValueError("found {'replicate': 1, 'shard': 1}"),
     lambda s: fs.muon(s.plan, fs.Mesh(), lr=0.1)),
    ("muon", "one path instead of a list", TypeError("matrix paths must be a list"),
     lambda s: fs.muon(s.plan, s.mesh, lr=0.1, matrices="0")),
    ("muon", "an optimizer instead of AdamW's options", TypeError("adamw must be a dictionary of options"),
     lambda s: fs.muon(s.plan, s.mesh, lr=0.1, adamw=sgd())),
    ("per_matrix", "states instead of functions", TypeError("per_matrix takes two functions"),
     lambda s: fs.per_matrix({}, {}, s.plan, s.mesh)),
    ("per_matrix", "an update of four arguments", TypeError("update must take (gradient, state, matrix)"),
     lambda s: fs.per_matrix(tuple, lambda g, s, m, lr: (g, s), s.plan, s.mesh)),
    ("per_matrix", "no optimizer of the biases", ValueError("others must be the optimizer of the leaves"),
     lambda s: fs.per_matrix(tuple, lambda g, s: (g, s), s.plan, s.mesh)),
    ("per_matrix", "Muon for other leaves", TypeError("found MuonStep, which has owners too"),
     lambda s: fs.per_matrix(tuple, lambda g, s: (g, s), s.plan, s.mesh, others=fs.muon(s.plan, s.mesh))),
    ("per_matrix", "an update of another shape", ValueError("with an update of shape"),
     lambda s: stepped(s, fs.per_matrix(id, lambda g, s: (g[0], s), s.plan, s.mesh, others=sgd()))),
    ("make_train_step torch_optimizer", "the two functions of an optimizer as a tuple of one's own",
     TypeError("pass the pair itself"), lambda s: stepped(s, tuple(sgd()))),
    ("make_train_step value_and_grad", "options of the gradient in two places",
     TypeError("found 'weighted' beside a function of value_and_grad or accumulate: pass it there"),
     lambda s: fs.make_train_step(fs.value_and_grad(s.loss_of_step), sgd(), s.plan, s.mesh, weighted=True)),
    ("make_train_step accumulate", "gradients over another mesh than the step's", ValueError("must have one mesh; found"),
     lambda s: fs.make_train_step(fs.accumulate(s.loss_of_step, 2, mesh=fs.Mesh()), sgd(), s.plan, s.mesh)),
    ("make_train_step", "a module that is frozen as a whole", ValueError("a training step needs a trainable leaf"),
     lambda mesh: fs.make_train_step(lambda s, b, x: x, sgd(), frozen_plan(mesh), mesh)),
    ("make_train_step", "a list of numbers as optimizer", TypeError("optimizer must be a pair (init, update)"),
     lambda s: s.step([1, 2])),
    ("make_train_step", "a flag as scaler", TypeError("scaler must be a funcshard.GradScaler, or None; found bool"),
     lambda s: s.step(scaler=True)),
    ("make_train_step Mesh", "a mesh of one rank", ValueError("found {'replicate': 1, 'shard': 1}"),
     lambda s: fs.make_train_step(s.loss_of_step, sgd(), s.plan, fs.Mesh())),
    ("make_train_step", "new buffers in the place of the aux", TypeError("(loss, weight, new_buffers, aux)"),
     lambda s: stepped(s, loss_fn=lambda shards, buffers, x: (s.loss(shards, x), "aux", buffers), mutable=True,
        has_aux=True)),
    ("make_train_step", "shards as new buffers", TypeError("under the names []; found"),
     lambda s: stepped(s, loss_fn=lambda shards, buffers, x: (s.loss(shards, x), shards), mutable=True)),
    ("GradScaler TrainState", "a state without scaling", ValueError("state._replace(scaler=scaler.init(mesh))"),
     lambda s: s.step(scaler=SCALER)(s.state(), s.x)),
    ("GradScaler", "gradients of another plan unscaled", ValueError("shards must hold the units of the plan", "must have"),
     lambda mesh: SCALER.unscale(ONES, SCALER.init(mesh), mesh, plan=fs.make_plan({"a": torch.ones(8)}, mesh, units=["a"]))),
    ("GradScaler", "a plan for other ranks given to unscale", ValueError("the plan was made for a mesh of"),
     lambda mesh: SCALER.unscale(ONES, SCALER.init(mesh), mesh, plan=fs.make_plan({"a": torch.ones(8)}, 7))),
    ("ScalerState", "a number instead of a state", TypeError("state must be a ScalerState of tensors; found 8.0"),
     lambda mesh: SCALER.scale(torch.ones(()), 8.0)),
]  # fmt: skip
