"""Mistakes with traced steps, and with passes over them."""

import functools
import tempfile
from pathlib import Path

import torch
import torchopt
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.misuse import APPLY, BUFFERS, DATA, PARAMS

MESH = fs.Mesh()  # a recording does not communicate
SCALE = torch.ones(())


def squares(out, x):
    return out.square().mean()


def set_up(loss=squares, optimizer=None, mesh=MESH, buffers=BUFFERS, **options):
    """Return a step with the loss ``loss(out, x)``, and a state."""
    plan = fs.make_plan(PARAMS, mesh, units=["0", "2"])
    sharded = fs.fully_shard(APPLY, plan, mesh)
    optimizer = optimizer or fs.torch_optimizer(torch.optim.SGD, lr=0.1)
    step = fs.make_train_step(lambda s, b, x: loss(sharded(s, BUFFERS, x), x), optimizer, plan, mesh, **options)
    return step, step.init(fs.shard(PARAMS, plan, mesh), buffers)


def traced(dynamic_shapes=None, **options):
    return fs.trace(*set_up(**options), DATA, dynamic_shapes=dynamic_shapes)


usual = functools.cache(traced)  # a traced step whose state nobody uses


def loaded(**options):
    with tempfile.TemporaryDirectory() as folder:
        usual().save(Path(folder, "step.json"))
        return fs.load_traced(Path(folder, "step.json"), MESH, **options)


CASES = [
    ("trace", "a function instead of the step",
     TypeError("trace takes the step that make_train_step returned; found function"),
     lambda: fs.trace(lambda state, batch: (state, {}), *set_up()[1:], DATA)),
    ("trace", "a loss with a tensor from outside", ValueError("found a tensor of shape () and torch.float32"),
     lambda: traced(loss=lambda out, x: (out * SCALE).mean())),
    ("trace", "dropout that a checkpoint of torch draws again",
     RuntimeError("random numbers that torch.utils.checkpoint draws again in backward"),
     lambda: traced(loss=lambda out, x: checkpoint(torch.dropout, out, 0.5, True, use_reentrant=False).mean())),
    ("trace", "numbers of a generator that the loss seeds",
     RuntimeError("found a torch.Generator given to aten.rand.generator"),
     lambda: traced(loss=lambda out, x: (out * torch.rand(1, generator=torch.Generator().manual_seed(1))).mean())),
    ("trace", "an optimizer that reads values", RuntimeError("found such code in clip.py, line"),
     lambda: traced(optimizer=torchopt.chain(torchopt.clip.clip_grad_norm(1.0), torchopt.sgd(0.1)))),
    *[("trace", f"a loss that reads values by {reading}", RuntimeError("found such code in graph.py, line"),
       lambda read=read: traced(loss=lambda out, x: squares(out, x) + len(str(read(out)))))
      for reading, read in {
          "torch.equal": lambda out: torch.equal(out, out), "a format": lambda out: f"{out.sum():.2f}",
          "torch.tensor": lambda out: torch.tensor([out.sum()]), "NumPy": lambda out: out.detach().numpy(),
      }.items()],
    ("trace", "an optimizer that does something else in its first call",
     RuntimeError("found one that changed its variable 'first_call'"),
     lambda: traced(optimizer=torchopt.sgd(0.1, momentum=0.9))),
    ("trace", "a weight that is a tensor", RuntimeError("trace takes a weight that is a number of Python"),
     lambda: traced(loss=lambda out, x: (squares(out, x), x.sum().square()), weighted=True)),
    ("trace", "compiled by a number",
     TypeError("compile takes the name of a backend of torch.compile, or a function; found int"),
     lambda: usual().compile(3)),
    ("trace", "compiled by an unknown backend",
     ValueError("or a function; found 'inducktor': torch.compiler.list_backends() lists the names"),
     lambda: usual().compile(backend="inducktor")),
    ("trace", "compiled by a function that returns none",
     TypeError("a backend returns a function; found NoneType for a region of"),
     lambda: usual().compile(backend=lambda module, like: None)),
    ("trace", "sizes that are numbers", ValueError("found '8, ...'"), lambda: traced("8, ...")),
    ("trace", "a state that depends on the batch", ValueError("found `state.buffers['last']`, whose size depends on"),
     lambda: traced("b, ...", loss=lambda out, x: (squares(out, x), {"last": x}), buffers={"last": DATA}, mutable=True)),
    ("trace", "with_sizes, an unknown size", ValueError("which gave the names b; found t"),
     lambda: usual("b, ...").with_sizes(t=3)),
    ("trace", "with_sizes, a size that nothing serves", ValueError("no recording serves b = 1; the last one needs b >= 2"),
     lambda: usual("b, ...").with_sizes(b=1)),
    ("trace", "with_sizes, half a size", ValueError("b must be a whole number of elements"),
     lambda: usual("b, ...").with_sizes(b=2.5)),
    ("load_traced", "the plan of another model", ValueError("trace the step again"),
     lambda: loaded(plan=fs.make_plan({"w": torch.ones(3)}, MESH))),
    ("load_traced", "a loss function as step",
     TypeError("step must be the step that make_train_step returned; found function"),
     lambda: loaded(step=lambda state, batch: (state, {}))),
    ("passes.update_early", "a step with a scaler",
     ValueError("update_early moves updates that depend on the gradients of their own unit alone"),
     lambda mesh: fs.passes.update_early(traced(mesh=mesh, scaler=fs.GradScaler()))),
    ("passes.update_early", "a step that clips", ValueError("which needs gradients of"),
     lambda mesh: fs.passes.update_early(traced(mesh=mesh, max_norm=1.0))),
]  # fmt: skip
for name in ("keep_gathered", "gather_earlier", "wait_later", "update_early"):
    CASES += [
        (f"passes.{name}", "the step itself",
         TypeError(f"{name} takes the traced step that fs.trace returned; found TrainStep"),
         lambda name=name: getattr(fs.passes, name)(set_up()[0], **{"budget": 1} if name == "keep_gathered" else {})),
    ]  # fmt: skip
