"""Mistakes with traced steps."""

import tempfile
from pathlib import Path

import torch
import torchopt
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.misuse import APPLY, BUFFERS, DATA, PARAMS, Table, right

CASES = Table(worlds=(1,))  # a recording does not communicate, so one world is enough
SCALE = torch.ones(())


def set_up(mesh, loss=lambda out: out.square().mean()):
    plan = fs.make_plan(PARAMS, mesh)
    sharded = fs.fully_shard(APPLY, plan, mesh)
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
    step = fs.make_train_step(lambda s, b, x: loss(sharded(s, b, x)), optimizer, plan, mesh)
    return step, step.init(fs.shard(PARAMS, plan, mesh), BUFFERS)


def traced(mesh, **options):
    step, state = set_up(mesh, **options)
    return fs.trace(step, state, DATA), state


CASES += [
    ("trace", "a function instead of the step",
     TypeError("trace takes the step that make_train_step returned; found function"),
     lambda mesh: fs.trace(lambda state, batch: (state, {}), *set_up(mesh)[1:], DATA)),
    ("trace", "the shards instead of the state", TypeError("the state must be the TrainState of step.init"),
     lambda mesh: fs.trace(set_up(mesh)[0], set_up(mesh)[1].shards, DATA)),
    ("trace", "a loss with a tensor from outside", ValueError("found a tensor of shape () and torch.float32"),
     lambda mesh: traced(mesh, loss=lambda out: (out * SCALE).mean())),
    ("trace", "a loss that branches on its value", RuntimeError("found such code in graph.py, line"),
     lambda mesh: traced(mesh, loss=lambda out: out.mean() if out.sum() > 0 else out.square().mean())),
    ("trace", "dropout that a checkpoint of torch draws again",
     RuntimeError("random numbers that torch.utils.checkpoint draws again in backward"),
     lambda mesh: traced(mesh, loss=lambda out: checkpoint(torch.dropout, out, 0.5, True,
        use_reentrant=False).square().mean())),
    ("trace", "numbers of a generator that the loss seeds",
     RuntimeError("found a torch.Generator given to aten.rand.generator"),
     lambda mesh: traced(mesh, loss=lambda out: (out * torch.rand(1, generator=torch.Generator().manual_seed(1))).mean())),
]  # fmt: skip


def with_optimizer(mesh, optimizer):
    plan = fs.make_plan(PARAMS, mesh)
    sharded = fs.fully_shard(APPLY, plan, mesh)
    step = fs.make_train_step(lambda s, b, x: sharded(s, b, x).mean(), optimizer, plan, mesh)
    return fs.trace(step, step.init(fs.shard(PARAMS, plan, mesh), BUFFERS), DATA)


CASES += [
    ("trace", "an optimizer that reads values", RuntimeError("found such code in clip.py, line"),
     lambda mesh: with_optimizer(mesh, torchopt.chain(torchopt.clip.clip_grad_norm(1.0), torchopt.sgd(0.1)))),
    ("trace", "an optimizer that does something else in its first call",
     RuntimeError("found one that changed its variable 'first_call'"),
     lambda mesh: with_optimizer(mesh, torchopt.sgd(0.1, momentum=0.9))),
]  # fmt: skip


def weighted_by_a_tensor(mesh):
    plan = fs.make_plan(PARAMS, mesh)
    sharded = fs.fully_shard(APPLY, plan, mesh)
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)

    def loss_fn(shards, buffers, x):
        return sharded(shards, buffers, x).square().mean(), x.sum().square()

    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, weighted=True)
    return fs.trace(step, step.init(fs.shard(PARAMS, plan, mesh), BUFFERS), DATA)


CASES += [
    ("trace", "a weight that is a tensor", RuntimeError("trace takes a weight that is a number of Python"),
     weighted_by_a_tensor),
    ("trace", "compiled by a number",
     TypeError("compile takes the name of a backend of torch.compile, or a function; found int"),
     lambda mesh: traced(mesh)[0].compile(3)),
    ("trace", "compiled by an unknown backend",
     ValueError("or a function; found 'inducktor': torch.compiler.list_backends() lists the names"),
     lambda mesh: traced(mesh)[0].compile(backend="inducktor")),
]  # fmt: skip


def no_compiler(module, like):
    return None


CASES += [
    ("trace", "compiled by a function that returns none",
     TypeError("a backend returns a function; found NoneType for a region of"),
     lambda mesh: traced(mesh)[0].compile(backend=no_compiler)),
]  # fmt: skip


def sized(mesh, names="b, ...", batch=DATA, **options):
    step, state = set_up(mesh, **options)
    return fs.trace(step, state, batch, dynamic_shapes=names)


CASES += [
    ("trace", "sizes that are numbers", ValueError("found '8, ...'"), lambda mesh: sized(mesh, "8, ...")),
    ("trace", "a size without a name", TypeError("in the form of the batch; found bool"), lambda mesh: sized(mesh, True)),
    ("trace", "more names than dims", ValueError("names 3 dims; found a tensor of shape"),
     lambda mesh: sized(mesh, "a, b, c")),
    ("trace", "names for another tree", ValueError("found a dictionary with the keys ['x'] for `batch`, which is one leaf"),
     lambda mesh: sized(mesh, {"x": "b, ..."})),
]  # fmt: skip


def growing(mesh):
    """A state that holds the last batch."""
    plan = fs.make_plan(PARAMS, mesh)
    sharded = fs.fully_shard(APPLY, plan, mesh)
    loss_fn = lambda s, b, x: (sharded(s, {}, x).square().mean(), {"last": x})  # noqa: E731
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh, mutable=True)
    return fs.trace(step, step.init(fs.shard(PARAMS, plan, mesh), {"last": DATA}), DATA, dynamic_shapes="b, ...")


CASES += [
    ("trace", "a state that depends on the batch", ValueError("found `state.buffers['last']`, whose size depends on"),
     growing),
]  # fmt: skip


CASES += [
    ("trace", "with_sizes, an unknown size", ValueError("which gave the names b; found t"),
     lambda mesh: sized(mesh).with_sizes(t=3)),
    ("trace", "with_sizes, no names", ValueError("which gave none; found b"), lambda mesh: traced(mesh)[0].with_sizes(b=3)),
    ("trace", "with_sizes, a size that nothing serves", ValueError("no recording serves b = 1; the last one needs b >= 2"),
     lambda mesh: sized(mesh).with_sizes(b=1)),
    ("trace", "with_sizes, half a size", ValueError("b must be a whole number of elements"),
     lambda mesh: sized(mesh).with_sizes(b=2.5)),
]  # fmt: skip


def used_twice(mesh):
    step, state = traced(mesh)
    step(state, DATA)
    return step(state, DATA)


CASES += [
    ("trace", "a state that was donated", RuntimeError("donated"), used_twice),
]  # fmt: skip


def with_another_batch(mesh):
    step, state = traced(mesh)
    return step(state, DATA[:1])[1]["loss"]


def plain(mesh):
    step, state = set_up(mesh)
    return step(state, DATA[:1])[1]["loss"]


CASES += [
    ("trace", "a batch of another size", right(lambda: fs.simulate(plain, 1)[0]), with_another_batch),
]  # fmt: skip


# --- files ----------------------------------------------------------------------------------------


def saved(mesh, change=lambda text: text, **options):
    """Save a traced step, change the file's text, and load it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.json")
        traced(mesh)[0].save(path)
        path.write_text(change(path.read_text()))
        return fs.load_traced(path, mesh, **options)


CASES += [
    ("load_traced", "a file of something else", ValueError("is not a file of Traced.save"),
     lambda mesh: saved(mesh, lambda text: "a story")),
    ("load_traced", "a file that was edited", ValueError("is damaged: its checksum is not the one that was saved"),
     lambda mesh: saved(mesh, lambda text: text.replace("aten::mm", "aten::bmm"))),
    ("load_traced", "the plan of another model", ValueError("trace the step again"),
     lambda mesh: saved(mesh, plan=fs.make_plan({"w": torch.ones(3)}, mesh))),
    ("load_traced", "a loss function as step",
     TypeError("step must be the step that make_train_step returned; found function"),
     lambda mesh: saved(mesh, step=lambda state, batch: (state, {}))),
    ("load_traced", "a batch of another size without a step", ValueError("leaf `batch`: recorded float32"),
     lambda mesh: saved(mesh)(set_up(mesh)[1], DATA[:1])),
]  # fmt: skip
