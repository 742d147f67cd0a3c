"""Mistakes with optimizers, training steps and loss scaling."""

import optree
import torch
from torch import nn

import funcshard as fs
from tests.misuse import BUFFERS, NET, PARAMS, Table, right, set_up, trained, untold, values, whole_grads

CASES = Table()
MISTAKES = "docs/mistakes.md"
AGAIN = "Don't divide, clip or scale gradients a second time."
SGD = torch.optim.SGD


def sgd(**options):
    return fs.torch_optimizer(SGD, **{"lr": 0.1, **options})


def stepped(s, optimizer=None, loss_fn=None, **options):
    """Return the full parameters after one step."""
    step = s.step(optimizer, loss_fn, **options)
    return s.whole(step(step.init(s.shards, BUFFERS), s.x)[0].shards)


def minus(params, grads, lr=0.1):
    return optree.tree_map(lambda leaf, grad: leaf - lr * grad, params, grads)


def first(s):
    """Return a step and the state before it."""
    step = s.step()
    return step, step.init(s.shards, BUFFERS)


def for_biases(plan, mesh):
    return sgd(groups=[{"paths": ["**.bias"], "lr": 1.0}], plan=plan, mesh=mesh)


# --- torch_optimizer ------------------------------------------------------------------------------

CASES += [
    ("torch_optimizer", "a wrong word that the class is elementwise",
     untold(MISTAKES, "`elementwise=True` is a promise that only you can check.", lambda: with_adafactor()),
     lambda s: stepped(s, fs.torch_optimizer(torch.optim.Adafactor, lr=0.1, elementwise=True))),
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
    ("torch_optimizer", "gradients and parameters swapped",
     untold(MISTAKES, "Gradients and parameters are trees of the same form, so you can swap them by mistake.", trained),
     lambda s: (o := sgd()) and s.whole(o.step(s.shards, o.init(s.shards), s.grads())[0])),
]  # fmt: skip


def with_adafactor():
    params = [nn.Parameter(leaf.clone()) for leaf in values().values()]
    for param, grad in zip(params, whole_grads().values(), strict=True):
        param.grad = grad
    torch.optim.Adafactor(params, lr=0.1).step()
    return dict(zip(PARAMS, (param.detach() for param in params), strict=True))


# --- torch_schedule, make_meter ---------------------------------------------------------------------

COSINE = torch.optim.lr_scheduler.CosineAnnealingLR

CASES += [
    ("torch_schedule", "a scheduler instead of its class", TypeError("or a function; found CosineAnnealingLR"),
     lambda mesh: fs.torch_schedule(COSINE(SGD(NET.parameters(), lr=0.1), 4), lr=0.1)),
    ("torch_schedule", "a function of the step", TypeError("a function from the step to a rate is a schedule already"),
     lambda mesh: fs.torch_schedule(lambda step: 0.1, lr=0.1)),
    ("make_meter", "tokens instead of the mesh", TypeError("call make_meter(mesh, tokens=...)"),
     lambda mesh: fs.make_meter(512)),
    ("make_meter", "the metrics before the state", TypeError("call meter(*step(state, batch))"),
     lambda s: fs.make_meter(s.mesh)({}, first(s)[1])),
]  # fmt: skip

# --- muon, per_matrix, assign_owners --------------------------------------------------------------------------

CASES += [
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
]  # fmt: skip

# --- make_train_step ------------------------------------------------------------------------------

CASES += [
    ("make_train_step torch_optimizer", "the two functions of an optimizer as a tuple of one's own",
     TypeError("pass the pair itself"), lambda s: stepped(s, tuple(sgd()))),
    ("make_train_step", "a pair of functions that returns parameters and not updates",
     untold(MISTAKES, "so don't return new parameters.", trained),
     lambda s: stepped(s, (lambda params: None, lambda grads, state, params: (minus(params, grads), state)))),
    ("make_train_step value_and_grad", "options of the gradient in two places",
     TypeError("found 'weighted' beside a function of value_and_grad or accumulate: pass it there"),
     lambda s: fs.make_train_step(fs.value_and_grad(s.loss_of_step), sgd(), s.plan, s.mesh, weighted=True)),
    ("make_train_step accumulate", "gradients over another mesh than the step's", ValueError("must have one mesh; found"),
     lambda s: fs.make_train_step(fs.accumulate(s.loss_of_step, 2, mesh=fs.Mesh()), sgd(), s.plan, s.mesh)),
    ("make_train_step", "a list of numbers as optimizer", TypeError("optimizer must be a pair (init, update)"),
     lambda s: s.step([1, 2])),
    ("make_train_step", "a loss without its weight", TypeError("must return (loss, weight); found a tensor"),
     lambda s: stepped(s, weighted=True)),
    ("make_train_step", "a loss without its buffers and aux", TypeError("must return (loss, new_buffers, aux); found a"),
     lambda s: stepped(s, mutable=True, has_aux=True)),
    ("make_train_step", "a number in the place of a function of gradients", TypeError("on_grads must be a function"),
     lambda s: s.step(on_grads=3)),
    ("make_train_step", "a flag as scaler", TypeError("scaler must be a funcshard.GradScaler, or None; found bool"),
     lambda s: s.step(scaler=True)),
    ("make_train_step", "an option that does not exist", TypeError("unexpected keyword argument 'micro_batches'"),
     lambda s: fs.make_train_step(s.loss_of_step, sgd(), s.plan, s.mesh, micro_batches=2)),
    ("make_train_step Mesh", "a mesh of one rank", ValueError("found {'replicate': 1, 'shard': 1}"),
     lambda s: fs.make_train_step(s.loss_of_step, sgd(), s.plan, fs.Mesh())),
    ("make_train_step", "new buffers in the place of the aux", TypeError("(loss, weight, new_buffers, aux)"),
     lambda s: stepped(s, loss_fn=lambda shards, buffers, x: (s.loss(shards, x), "aux", buffers), mutable=True,
        has_aux=True)),
    ("make_train_step", "shards as new buffers", TypeError("under the names []; found"),
     lambda s: stepped(s, loss_fn=lambda shards, buffers, x: (s.loss(shards, x), shards), mutable=True)),
    ("make_train_step", "a step under no_grad", right(trained), torch.no_grad()(stepped)),
    ("make_train_step", "dropout with one seed on all ranks",
     untold("docs/training.md",
        "With one stream on every rank, dropout uses the same masks for each rank's part of the batch.", True),
     lambda s: dropped(s.mesh)),
]  # fmt: skip


def dropped(mesh):
    """Return whether the ranks drew different masks."""
    torch.manual_seed(0)
    mask = nn.functional.dropout(torch.ones(64))
    return not torch.equal(fs.pmean(mask, mesh), mask)


# --- TrainState, copy -----------------------------------------------------------------------------

CASES += [
    ("copy", "of a module", right(True), lambda mesh: fs.copy({"net": NET})["net"] is NET),
    ("copy", "on one rank only", right(values), lambda s: s.whole(fs.copy(s.shards) if s.mesh.rank == 0 else s.shards)),
]  # fmt: skip

# --- GradScaler -----------------------------------------------------------------------------------

SCALER = fs.GradScaler(init_scale=8.0)
ONES = {"w": torch.ones(2)}

CASES += [
    ("GradScaler TrainState", "a state without scaling", ValueError("state._replace(scaler=scaler.init(mesh))"),
     lambda s: s.step(scaler=SCALER)(first(s)[1], s.x)),
    ("GradScaler", "the loss scaled by hand too", untold(MISTAKES, AGAIN, trained),
     lambda s: stepped(s, scaler=SCALER, loss_fn=lambda shards, buffers, x:
        SCALER.scale(s.loss(shards, x), SCALER.init(s.mesh)))),
    ("GradScaler", "gradients unscaled twice", untold(MISTAKES, AGAIN, {"w": torch.full((2,), 1 / 8)}),
     lambda mesh: (state := SCALER.init(mesh)) and SCALER.unscale(SCALER.unscale(ONES, state, mesh)[0], state, mesh)[0]),
    ("GradScaler", "gradients of another plan unscaled", ValueError("shards must hold the units of the plan", "must have"),
     lambda mesh: SCALER.unscale(ONES, SCALER.init(mesh), mesh, plan=fs.make_plan({"a": torch.ones(8)}, mesh, units=["a"]))),
    ("GradScaler", "a plan for other ranks given to unscale", ValueError("the plan was made for a mesh of"),
     lambda mesh: SCALER.unscale(ONES, SCALER.init(mesh), mesh, plan=fs.make_plan({"a": torch.ones(8)}, 7))),
    ("GradScaler Mesh", "infinities looked for on one rank",
     untold(MISTAKES, "`fs.Mesh()` is a world of one rank, so a collective over it returns this rank's numbers.", True),
     lambda mesh: SCALER.unscale({"w": torch.tensor([float("inf") if mesh.rank == 0 else 1.0])}, SCALER.init(mesh),
        fs.Mesh())[1].item()),
    ("ScalerState", "a number instead of a state", TypeError("state must be a ScalerState of tensors; found 8.0"),
     lambda mesh: SCALER.scale(torch.ones(()), 8.0)),
]  # fmt: skip
