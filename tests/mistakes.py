"""The mistakes on the page "Mistakes and remedies": each with its message, its cause and its cure.

``tests/promises/test_mistakes.py`` makes each mistake and asserts the message. The page lists the
same messages; ``python -m tests.mistakes`` writes that part of ``docs/mistakes.md`` anew.
"""

from __future__ import annotations

import copy
import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import funcshard as fs
from tests.misuse import BUFFERS, DATA, NET, PARAMS, Setup

__all__ = ["MISTAKES", "PAGE", "Mistake", "page"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "mistakes.md"
BEGIN, END = "<!-- mistakes: begin; python -m tests.mistakes writes this part -->", "<!-- mistakes: end -->"
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake.

    Attributes:
        section: the heading that the page lists it under.
        kind: the class of its error or warning.
        words: words of the message, which the page shows.
        cause: the mistake, in a sentence.
        cure: the remedy, in a sentence.
        program: the program that makes it.
    """

    section: str
    kind: type[BaseException]
    words: str
    cause: str
    cure: str
    program: Callable[[Setup], Any]

    def __str__(self) -> str:
        return self.words


MISTAKES: list[Mistake] = []


def mistake(
    section: str, kind: type[BaseException], words: str, cause: str, cure: str, program: Callable[[Setup], Any]
) -> None:
    MISTAKES.append(Mistake(section, kind, words, cause, cure, program))


def page(text: str) -> str:
    """Return the page with its generated part written anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    parts = []
    for section in dict.fromkeys(each.section for each in MISTAKES):
        parts.append(f"## {section}")
        own = [each for each in MISTAKES if each.section == section]
        parts += [f"- `{each.kind.__name__}: {each.words}`\n\n{_answer(each)}" for each in own]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def _answer(mistake: Mistake) -> str:
    """Return cause and cure as a paragraph of a list, in lines that break between words only."""
    text = f"*Cause:* {mistake.cause} *Cure:* {mistake.cure}"
    indent = "  "
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


# --- modules --------------------------------------------------------------------------------------

MODULES = "Modules and their functions"
MADE = "Call `apply, params, buffers = fs.make_functional(net)`"

mistake(
    MODULES, TypeError, "fully_shard takes the apply that make_functional returned; found a module",
    "`fs.fully_shard(net, plan, mesh)` got the module itself.",
    f"{MADE}, and pass `apply`.",
    lambda s: fs.fully_shard(NET, s.plan, s.mesh),
)  # fmt: skip
mistake(
    MODULES, TypeError, "found all that it returned, a tuple",
    "`fs.fully_shard(fs.make_functional(net), plan, mesh)` got all three results.",
    "Unpack them into `apply, params, buffers`, and pass `apply`.",
    lambda s: fs.fully_shard(fs.make_functional(NET), s.plan, s.mesh),
)  # fmt: skip
mistake(
    MODULES, TypeError, "leaf '' must be a torch.Tensor; found Sequential",
    "`fs.make_plan(net, mesh)` got the module itself.",
    f"{MADE}, and pass `params`.",
    lambda s: fs.make_plan(NET, s.mesh),
)  # fmt: skip
mistake(
    MODULES, TypeError, "unshard takes a function of leaves; found a module with parameters of its own",
    "`fs.unshard(block, unit, mesh)` got a module.",
    "Pass a function of leaves, such as the `apply` of `fs.make_functional(block)`.",
    lambda s: fs.unshard(NET, s.plan.units["0"], s.mesh),
)  # fmt: skip
mistake(
    MODULES, TypeError, "init_shards takes a function init(unit)",
    "`fs.init_shards(net, plan, mesh)` got the module itself.",
    "Call `fs.init_module(net, plan, mesh)` with a module on meta.",
    lambda s: fs.init_shards(NET, s.plan, s.mesh),
)  # fmt: skip
for words, change, cause, cure in (
    ("train() or eval() was called", nn.Module.eval,
     "`net.eval()` came after `make_functional`, which had copied the module.",
     "Pass `apply.eval()` to `fully_shard`; it takes the same shards."),
    ("parameters were frozen or unfrozen", lambda net: net.requires_grad_(False),
     "`net.requires_grad_(False)` came after `make_functional`, which had copied the module.",
     "Freeze first, then call `make_functional` and `make_plan`."),
    ("its parameters were written", lambda net: net.load_state_dict(net.state_dict()),
     "`net.load_state_dict(...)`, or training of `net`, came after `make_functional`, which had copied it.",
     "Load first, or call `fs.from_state_dict(state_dict, plan, mesh)`."),
    ("hooks were added or removed", lambda net: net[0].register_forward_hook(lambda *_: None),
     "`net.register_forward_hook(...)` came after `make_functional`, which had copied the module.",
     "Register hooks first, then call `make_functional`."),
):  # fmt: skip
    mistake(
        MODULES, UserWarning, f"was changed after make_functional had copied it: {words}", cause, cure,
        lambda s, change=change: shard_after(s, change),
    )  # fmt: skip
mistake(
    MODULES, AttributeError, "a function of fully_shard has no attribute 'eval'",
    "`sharded.eval()` is a habit from modules; a function has one mode for good.",
    "Call `fs.fully_shard(apply.eval(), plan, mesh)`.",
    lambda s: s.sharded.eval(),
)  # fmt: skip


def shard_after(s, change):
    net = copy.deepcopy(NET)
    apply, params, _ = fs.make_functional(net)
    change(net)
    return fs.fully_shard(apply, fs.make_plan(params, s.mesh), s.mesh)


# --- shards ---------------------------------------------------------------------------------------

SHARDS = "Parameters and shards"

mistake(
    SHARDS, ValueError, "these are whole parameters; cut them first with shards = fs.shard(params, plan, mesh)",
    "`sharded(params, buffers, x)` got the whole parameters.",
    "Call `shards = fs.shard(params, plan, mesh)` once, and pass `shards`.",
    lambda s: s.sharded(PARAMS, BUFFERS, s.x),
)  # fmt: skip
mistake(
    SHARDS, ValueError, "these are shards: call the function of fully_shard",
    "`apply(shards, buffers, x)` got shards.",
    "Call the function that `fs.fully_shard(apply, plan, mesh)` returned.",
    lambda s: fs.make_functional(NET)[0](s.shards, BUFFERS, s.x),
)  # fmt: skip
mistake(
    SHARDS, AttributeError, "a function of fully_shard has no attribute 'parameters'",
    "`torch.optim.AdamW(sharded.parameters())` expects a module.",
    "The parameters are the shards: make the optimizer with `fs.torch_optimizer`, and call `step.init(shards, buffers)`.",
    lambda s: ADAMW(s.sharded.parameters()),
)  # fmt: skip

# --- gradients ------------------------------------------------------------------------------------

GRADIENTS = "Losses and backward"

mistake(
    GRADIENTS, RuntimeError, "element 0 of tensors does not require grad and does not have a grad_fn",
    "`loss.backward()` was called on the loss of a sharded function, of a step, or of `value_and_grad`. Shards are plain "
    "tensors, and `.grad` is never set.",
    "Leave it out: `fs.value_and_grad(loss_fn)(shards, ...)` returns the gradients, and a step uses them.",
    lambda s: s.loss(s.shards, s.x).backward(),
)  # fmt: skip
mistake(
    GRADIENTS, RuntimeError, "If loss_fn calls loss.backward(), leave that out",
    "`loss.backward()` inside the loss function frees the graph that `value_and_grad` needs.",
    "Return the loss only.",
    lambda s: fs.value_and_grad(lambda shards: backward(s.loss(shards, s.x)))(s.shards),
)  # fmt: skip
mistake(
    GRADIENTS, TypeError, "value_and_grad takes a function loss_fn(shards, ...) that returns a loss; found a module",
    "`fs.value_and_grad(net)` got a module, whose parameters are no shards.",
    "Write a function that calls the function of `fully_shard`.",
    lambda s: fs.value_and_grad(NET),
)  # fmt: skip


def backward(loss):
    loss.backward()
    return loss


# --- optimizers and steps -------------------------------------------------------------------------

OPTIMIZERS = "Optimizers and training steps"

mistake(
    OPTIMIZERS, TypeError, "optimizer can only optimize Tensors, but one of the params is str",
    "`torch.optim.AdamW(shards, lr=1e-3)` is an optimizer that changes tensors by itself.",
    "Call `fs.torch_optimizer(torch.optim.AdamW, lr=1e-3)`, and give the shards to `step.init`.",
    lambda s: ADAMW(s.shards, lr=1e-3),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "found the class AdamW: pass fs.torch_optimizer(torch.optim.AdamW, lr=...)",
    "`fs.make_train_step(loss_fn, torch.optim.AdamW, plan, mesh)` got a class of torch.",
    "Pass `fs.torch_optimizer(torch.optim.AdamW, lr=1e-3)`.",
    lambda s: s.step(ADAMW),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "found an instance of AdamW: pass torch_optimizer(torch.optim.AdamW, lr=...)",
    "`fs.torch_optimizer(torch.optim.AdamW(net.parameters()))` got an optimizer of the module's parameters.",
    "Pass the class and its options; the state comes from `step.init(shards, buffers)`.",
    lambda s: fs.torch_optimizer(ADAMW(NET.parameters())),
)  # fmt: skip
mistake(
    OPTIMIZERS, ValueError, "call fs.muon(plan, mesh, lr=...), which updates whole matrices",
    "`fs.torch_optimizer(torch.optim.Muon)` would orthogonalise slices of matrices.",
    "Call `fs.muon(plan, mesh, lr=...)`.",
    lambda s: fs.torch_optimizer(torch.optim.Muon),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "AdamW has no option 'learning_rate': did you mean 'lr'?",
    "An option is misspelled, or has the name of another library.",
    "Use the names of the class in `torch.optim`.",
    lambda s: fs.torch_optimizer(ADAMW, learning_rate=1e-3),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "TorchOptimizer is not an Optimizer",
    "`CosineAnnealingLR(optimizer, T_max=100)` expects an optimizer that it can change.",
    "Pass `lr=fs.torch_schedule(CosineAnnealingLR, lr=1e-3, T_max=100)` to `fs.torch_optimizer`.",
    lambda s: schedulers.CosineAnnealingLR(fs.torch_optimizer(ADAMW, lr=1e-3), T_max=100),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "pass lr=fs.torch_schedule(CosineAnnealingLR, lr=..., ...)",
    "`fs.torch_optimizer(cls, lr=scheduler)` got a scheduler of torch, which changes an optimizer of torch.",
    "Pass `lr=fs.torch_schedule(CosineAnnealingLR, lr=1e-3, T_max=100)`.",
    lambda s: fs.torch_optimizer(ADAMW, lr=schedulers.CosineAnnealingLR(ADAMW(NET.parameters()), T_max=100)),
)  # fmt: skip
mistake(
    OPTIMIZERS, AttributeError, "an optimizer of torch_optimizer or muon has no attribute 'param_groups'",
    "`optimizer.param_groups[0]['lr'] = ...` would change the learning rate behind the step's back.",
    "Pass `lr=` as a function of the step, and read `metrics['lr']`.",
    lambda s: fs.torch_optimizer(SGD, lr=0.1).param_groups,
)  # fmt: skip
mistake(
    OPTIMIZERS, AttributeError, "an optimizer of torch_optimizer or muon has no attribute 'zero_grad'",
    "`optimizer.zero_grad()` is a habit from torch; there is no `.grad`.",
    "Leave it out: each call of `value_and_grad` returns new gradients.",
    lambda s: fs.torch_optimizer(SGD, lr=0.1).zero_grad(),
)  # fmt: skip
mistake(
    OPTIMIZERS, AttributeError, "an optimizer of torch_optimizer or muon has no attribute 'state_dict'",
    "`optimizer.state_dict()` expects an optimizer that holds its state; here the state is `state.opt_state`.",
    "Call `fs.save(path, state, plan, mesh)`, or `fs.optimizer_to_state_dict` for a state dict of torch.",
    lambda s: fs.torch_optimizer(SGD, lr=0.1).state_dict(),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "found torch's GradScaler, which keeps its scale to itself",
    "`make_train_step(..., scaler=torch.amp.GradScaler())` got the scaler of torch.",
    "Pass `scaler=fs.GradScaler()`.",
    lambda s: s.step(scaler=torch.amp.GradScaler("cpu", enabled=False)),
)  # fmt: skip
mistake(
    OPTIMIZERS, ValueError, "is not one of torch_optimizer(SGD): it must hold nothing; found ['exp_avg',",
    "A state of AdamW was given to a step with SGD.",
    "Make a new state with `optimizer.init(shards)`, or go on with the optimizer that the state was made with.",
    lambda s: s.step()(stepped(s, fs.torch_optimizer(ADAMW, lr=1e-3)), s.x),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "loss_fn must be a function loss_fn(shards, buffers, batch); found a module",
    "`fs.make_train_step(net, ...)` got a module, whose parameters no step would train.",
    "Pass a function that calls the function of `fully_shard` and returns the loss.",
    lambda s: s.step(loss_fn=NET),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "loss_fn must be a function loss_fn(shards, buffers, batch); found one of (shards, batch)",
    "The loss function of a step takes three arguments, also if the model has no buffers.",
    "Write `lambda shards, buffers, batch: ...`.",
    lambda s: s.step(loss_fn=lambda shards, batch: s.loss(shards, batch)),
)  # fmt: skip
mistake(
    OPTIMIZERS, AttributeError, "a training step has no attribute 'backward'",
    "`step.backward()` is a habit from other engines.",
    "Call `state, metrics = step(state, batch)`, which runs forward, backward and the optimizer.",
    lambda s: s.step().backward(),
)  # fmt: skip


def stepped(s, optimizer):
    step = s.step(optimizer)
    return step(step.init(s.shards, BUFFERS), s.x)[0]


# --- state dicts and checkpoints ------------------------------------------------------------------

STATE = "State dicts and checkpoints"

mistake(
    STATE, UserWarning, "the state dict holds ['9.weight'], which are no leaves of the plan and were left out",
    "The state dict is of a larger model, or its names differ from those of the plan.",
    "Make the plan from the params of the same module, or delete these names from the state dict.",
    lambda s: fs.from_state_dict({**PARAMS, "9.weight": torch.ones(2)}, s.plan, s.mesh),
)  # fmt: skip
mistake(
    STATE, ValueError, "under names that carry the prefix 'module.' that has to be removed",
    "The state dict was saved from DistributedDataParallel, or from a compiled module.",
    "Remove the prefix with the function that the message names.",
    lambda s: fs.from_state_dict({f"module.{name}": leaf for name, leaf in PARAMS.items()}, s.plan, s.mesh),
)  # fmt: skip
mistake(
    STATE, ValueError, "its entry 'model' is a state dict that holds them: pass state_dict['model']",
    "The file holds a state dict among other things, such as the epoch.",
    "Pass the entry that the message names.",
    lambda s: fs.from_state_dict({"model": PARAMS, "epoch": 3}, s.plan, s.mesh),
)  # fmt: skip
mistake(
    STATE, TypeError, "a state dict must be a dictionary {name: tensor}; found str",
    "`fs.from_state_dict(path, plan, mesh)` got a path.",
    "Pass `torch.load(path, weights_only=True)`, or call `fs.import_safetensors(path, plan, mesh)`.",
    lambda s: fs.from_state_dict("model.pt", s.plan, s.mesh),
)  # fmt: skip
mistake(
    STATE, TypeError, "a state dict must be a dictionary {name: tensor}; found Sequential",
    "`fs.from_state_dict(net, plan, mesh)` got a module.",
    "Pass `net.state_dict()`.",
    lambda s: fs.from_state_dict(NET, s.plan, s.mesh),
)  # fmt: skip
mistake(
    STATE, FileNotFoundError, "which is a file, and save makes a folder",
    "`fs.restore('model.pt', plan, mesh)` got a file that `torch.save` wrote.",
    "Pass `torch.load(path, weights_only=True)` to `fs.from_state_dict`.",
    lambda s: fs.restore(__file__, s.plan, s.mesh),
)  # fmt: skip
mistake(
    STATE, Exception, "Weights only load failed",
    "`torch.load` read a state that `torch.save(state, path)` wrote. Such a file holds the shards of one rank only.",
    "Call `fs.save(path, state, plan, mesh)` and `fs.restore(path, plan, mesh)`, which fit any number of ranks.",
    lambda s: torch.load(saved(s.step().init(s.shards, BUFFERS))),
)  # fmt: skip
mistake(
    STATE, TypeError, "a function that fully_shard returned cannot be pickled",
    "`torch.save(sharded, path)` tried to save the connections of this rank.",
    "Call `fs.save(path, state, plan, mesh)` for a checkpoint, or save `fs.to_state_dict(shards, plan, mesh)`.",
    lambda s: saved(s.sharded),
)  # fmt: skip
mistake(
    STATE, TypeError, "a training step cannot be pickled",
    "`torch.save(step, path)` tried to save functions and connections.",
    "Save the state instead, with `fs.save(path, state, plan, mesh)`.",
    lambda s: saved(s.step()),
)  # fmt: skip
mistake(
    STATE, TypeError, "a mesh cannot be pickled",
    "A dictionary with the mesh in it was saved, or sent to another process.",
    "Leave the mesh out, and call `fs.init_mesh()` in each process.",
    lambda s: saved({"mesh": s.mesh}),
)  # fmt: skip
mistake(
    STATE, RuntimeError, "this tensor was donated to a training step",
    "`copy.deepcopy(state)`, `torch.save(state, path)` or another use came after the step that took the state.",
    "Use the state that the step returned, or call `fs.copy(state)` before the step.",
    lambda s: copy.deepcopy(donated(s)),
)  # fmt: skip


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def donated(s):
    step = s.step()
    state = step.init(s.shards, BUFFERS)
    step(state, DATA)
    return state


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
