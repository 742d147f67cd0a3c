"""Mistakes with traced steps."""

import functools
import tempfile
from pathlib import Path

import torch
import torchopt
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.misuse import APPLY, BUFFERS, DATA, PARAMS, Table, right

CASES = Table()
MESH = fs.Mesh()  # a recording does not communicate
SCALE = torch.ones(())


def set_up(loss=lambda out: out.square().mean()):
    plan = fs.make_plan(PARAMS, MESH)
    sharded = fs.fully_shard(APPLY, plan, MESH)
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
    step = fs.make_train_step(lambda s, b, x: loss(sharded(s, b, x)), optimizer, plan, MESH)
    return step, step.init(fs.shard(PARAMS, plan, MESH), BUFFERS)


def traced(**options):
    step, state = set_up(**options)
    return fs.trace(step, state, DATA), state


@functools.cache
def usual():
    """Return a traced step whose state nobody uses."""
    return traced()[0]


CASES += [
    ("trace", "a function instead of the step",
     TypeError("trace takes the step that make_train_step returned; found function"),
     lambda: fs.trace(lambda state, batch: (state, {}), *set_up()[1:], DATA)),
    ("trace", "a loss with a tensor from outside", ValueError("found a tensor of shape () and torch.float32"),
     lambda: traced(loss=lambda out: (out * SCALE).mean())),
    ("trace", "dropout that a checkpoint of torch draws again",
     RuntimeError("random numbers that torch.utils.checkpoint draws again in backward"),
     lambda: traced(loss=lambda out: checkpoint(torch.dropout, out, 0.5, True,
        use_reentrant=False).square().mean())),
    ("trace", "numbers of a generator that the loss seeds",
     RuntimeError("found a torch.Generator given to aten.rand.generator"),
     lambda: traced(loss=lambda out: (out * torch.rand(1, generator=torch.Generator().manual_seed(1))).mean())),
]  # fmt: skip


def with_optimizer(optimizer):
    plan = fs.make_plan(PARAMS, MESH)
    sharded = fs.fully_shard(APPLY, plan, MESH)
    step = fs.make_train_step(lambda s, b, x: sharded(s, b, x).mean(), optimizer, plan, MESH)
    return fs.trace(step, step.init(fs.shard(PARAMS, plan, MESH), BUFFERS), DATA)


CASES += [
    ("trace", "an optimizer that reads values", RuntimeError("found such code in clip.py, line"),
     lambda: with_optimizer(torchopt.chain(torchopt.clip.clip_grad_norm(1.0), torchopt.sgd(0.1)))),
    ("trace", "an optimizer that does something else in its first call",
     RuntimeError("found one that changed its variable 'first_call'"),
     lambda: with_optimizer(torchopt.sgd(0.1, momentum=0.9))),
]  # fmt: skip


def weighted_by_a_tensor():
    plan = fs.make_plan(PARAMS, MESH)
    sharded = fs.fully_shard(APPLY, plan, MESH)
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)

    def loss_fn(shards, buffers, x):
        return sharded(shards, buffers, x).square().mean(), x.sum().square()

    step = fs.make_train_step(loss_fn, optimizer, plan, MESH, weighted=True)
    return fs.trace(step, step.init(fs.shard(PARAMS, plan, MESH), BUFFERS), DATA)


CASES += [
    ("trace", "a weight that is a tensor", RuntimeError("trace takes a weight that is a number of Python"),
     weighted_by_a_tensor),
    ("trace", "compiled by a number",
     TypeError("compile takes the name of a backend of torch.compile, or a function; found int"),
     lambda: usual().compile(3)),
    ("trace", "compiled by an unknown backend",
     ValueError("or a function; found 'inducktor': torch.compiler.list_backends() lists the names"),
     lambda: usual().compile(backend="inducktor")),
]  # fmt: skip


def no_compiler(module, like):
    return None


CASES += [
    ("trace", "compiled by a function that returns none",
     TypeError("a backend returns a function; found NoneType for a region of"),
     lambda: usual().compile(backend=no_compiler)),
]  # fmt: skip


def sized(names="b, ...", batch=DATA, **options):
    step, state = set_up(**options)
    return fs.trace(step, state, batch, dynamic_shapes=names)


@functools.cache
def usual_sized():
    return sized()


CASES += [
    ("trace", "sizes that are numbers", ValueError("found '8, ...'"), lambda: sized("8, ...")),
    ("trace", "names for another tree", ValueError("found a dictionary with the keys ['x'] for `batch`, which is one leaf"),
     lambda: sized({"x": "b, ..."})),
]  # fmt: skip


def growing():
    """A state that holds the last batch."""
    plan = fs.make_plan(PARAMS, MESH)
    sharded = fs.fully_shard(APPLY, plan, MESH)
    loss_fn = lambda s, b, x: (sharded(s, {}, x).square().mean(), {"last": x})  # noqa: E731
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, MESH, mutable=True)
    return fs.trace(step, step.init(fs.shard(PARAMS, plan, MESH), {"last": DATA}), DATA, dynamic_shapes="b, ...")


CASES += [
    ("trace", "a state that depends on the batch", ValueError("found `state.buffers['last']`, whose size depends on"),
     growing),
    ("trace", "with_sizes, an unknown size", ValueError("which gave the names b; found t"),
     lambda: usual_sized().with_sizes(t=3)),
    ("trace", "with_sizes, a size that nothing serves", ValueError("no recording serves b = 1; the last one needs b >= 2"),
     lambda: usual_sized().with_sizes(b=1)),
    ("trace", "with_sizes, half a size", ValueError("b must be a whole number of elements"),
     lambda: usual_sized().with_sizes(b=2.5)),
]  # fmt: skip


def used_twice():
    step, state = traced()
    step(state, DATA)
    return step(state, DATA)


CASES += [
    ("trace", "a state that was donated", RuntimeError("donated"), used_twice),
]  # fmt: skip


def with_another_batch():
    step, state = traced()
    return step(state, DATA[:1])[1]["loss"]


def plain():
    step, state = set_up()
    return step(state, DATA[:1])[1]["loss"]


CASES += [
    ("trace", "a batch of another size", right(plain), with_another_batch),
]  # fmt: skip


# --- files ----------------------------------------------------------------------------------------


def saved(change=lambda text: text, **options):
    """Save a traced step, change the file's text, and load it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.json")
        usual().save(path)
        path.write_text(change(path.read_text()))
        return fs.load_traced(path, MESH, **options)


CASES += [
    ("load_traced", "the plan of another model", ValueError("trace the step again"),
     lambda: saved(plan=fs.make_plan({"w": torch.ones(3)}, MESH))),
    ("load_traced", "a loss function as step",
     TypeError("step must be the step that make_train_step returned; found function"),
     lambda: saved(step=lambda state, batch: (state, {}))),
]  # fmt: skip
