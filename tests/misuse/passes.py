"""Mistakes with passes of traced steps."""

import functools

import torch

import funcshard as fs
from tests.misuse import APPLY, BUFFERS, DATA, PARAMS, Table, right

CASES = Table(worlds=(1,))  # a pass does not communicate, so one world is enough


def set_up(mesh, **options):
    plan = fs.make_plan(PARAMS, mesh, units=["0", "2"])
    sharded = fs.fully_shard(APPLY, plan, mesh)
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
    step = fs.make_train_step(lambda s, b, x: sharded(s, b, x).square().mean(), optimizer, plan, mesh, **options)
    return step, step.init(fs.shard(PARAMS, plan, mesh), BUFFERS)


@functools.cache
def traced():
    return fs.trace(*set_up(fs.Mesh()), DATA)


OPTIONS = {
    "keep_gathered": {"budget": "1GiB"}, "gather_earlier": {}, "wait_later": {},
    "update_early": {}, "drop_unused": {},
}  # fmt: skip
for name, options in OPTIONS.items():
    CASES += [
        (f"passes.{name}", "the step itself",
         TypeError(f"{name} takes the traced step that fs.trace returned; found TrainStep"),
         lambda mesh, name=name, options=options: getattr(fs.passes, name)(set_up(mesh)[0], **options)),
    ]  # fmt: skip


CASES += [
    ("passes.wait_later", "a budget below the arguments", right(lambda: str(traced())),
     lambda mesh: str(fs.passes.wait_later(traced(), budget=1))),
]  # fmt: skip
for what, options in {"a clipped step": {"max_norm": 1.0}, "a step with a scaler": {"scaler": fs.GradScaler()}}.items():
    CASES += [
        ("passes.update_early", what,
         ValueError("update_early moves updates that depend on the gradients of their own unit alone"),
         lambda mesh, options=options: fs.passes.update_early(fs.trace(*set_up(mesh, **options), DATA)), (2,)),
    ]  # fmt: skip
