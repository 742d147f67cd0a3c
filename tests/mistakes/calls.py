"""Mistakes with functions, shards and gradients."""

import copy
from collections import UserDict
from dataclasses import dataclass

import torch
from torch import nn

import funcshard as fs
from tests.mistakes.table import mistake
from tests.misuse import BUFFERS, NET, PARAMS

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
    MODULES, TypeError, "found the method eval: call it, as in apply.eval()",
    "`fs.fully_shard(apply.eval, plan, mesh)` lacks the parentheses.",
    "Write `fs.fully_shard(apply.eval(), plan, mesh)`.",
    lambda s: fs.fully_shard(fs.make_functional(NET)[0].eval, s.plan, s.mesh),
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
mistake(
    MODULES, TypeError, "make_functional takes a torch.nn.Module; found the class Linear",
    "`fs.make_functional(Net)` got the class of the module.",
    "Make a module of it, as in `fs.make_functional(Net())`.",
    lambda s: fs.make_functional(nn.Linear),
)  # fmt: skip
mistake(
    MODULES, TypeError, "fully_shard() missing 2 required positional arguments: 'plan' and 'mesh'",
    "`fs.fully_shard(block)` is FSDP2's call, which changes the block.",
    f"{MADE} and `plan = fs.make_plan(params, mesh, units=['blocks.*'])`, then `fs.fully_shard(apply, plan, mesh)` once.",
    lambda s: fs.fully_shard(NET[0]),
)  # fmt: skip
mistake(
    MODULES, TypeError, "fully_shard() got an unexpected keyword argument 'reshard_after_forward'",
    "`reshard_after_forward=`, `mp_policy=` and `offload_policy=` are options of FSDP2's `fully_shard`.",
    "Pass `reshard_after_forward=`, `precision=fs.MixedPrecision(...)` and `offload=` to `fs.make_plan`.",
    lambda s: fs.fully_shard(fs.make_functional(NET)[0], s.plan, s.mesh, reshard_after_forward=False),
)  # fmt: skip
mistake(
    MODULES, TypeError, "module '(root)' is parallelized by DataParallel",
    "The module was wrapped by DistributedDataParallel or DataParallel, or FSDP2's `fully_shard` has changed it.",
    "Pass the module that torch has not parallelized, such as `ddp.module`.",
    lambda s: fs.make_functional(nn.DataParallel(NET)),
)  # fmt: skip
mistake(
    MODULES, ValueError, "found 'hybrid_shard': pass a mesh of two axes",
    "`strategy='hybrid_shard'` is FSDP's name; here the mesh says which ranks hold copies.",
    "Pass a mesh such as `fs.init_mesh({'replicate': 2, 'shard': 8})`, and `strategy='full_shard'`.",
    lambda s: fs.make_plan(PARAMS, s.mesh, strategy="hybrid_shard"),
)  # fmt: skip
mistake(
    MODULES, ValueError, "unit 'layers.*' matches no part of the tree",
    "The layers lie deeper, as in `model.layers`, or under a prefix of peft.",
    "Write the path that the message proposes, such as `units=['model.layers.*']`.",
    lambda s: fs.make_plan({"model": {"layers": [PARAMS, PARAMS]}}, s.mesh, units=["layers.*"]),
)  # fmt: skip
mistake(
    MODULES, UserWarning, "and each call gathers all of them at once: write units=['blocks.*']",
    "`units=['blocks']` makes one unit of all layers, so each rank holds all of them in each step.",
    "Write `units=['blocks.*']`, one unit for each layer.",
    lambda s: fs.make_plan({"blocks": [{"w": torch.empty(2**14, 2**14, device="meta")} for _ in "ab"]}, 2, units=["blocks"]),
)  # fmt: skip
mistake(
    MODULES, TypeError, "by_class takes one or more subclasses of torch.nn.Module; found Sequential",
    "`fs.wrap.by_class(net, Block)` got the module among the classes.",
    "Call `fs.wrap.by_class(Block)(net)`.",
    lambda s: fs.wrap.by_class(NET, nn.Linear),
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
mistake(
    MODULES, AttributeError, "has no attribute 'generate': it is a method of the module",
    "`sharded.generate(...)` asks a function for a method of the module.",
    "Make a function of the method, `fs.fully_shard(apply.method('generate'), plan, mesh)`.",
    lambda s: sharded_method(s).generate(),
)  # fmt: skip
mistake(
    MODULES, AttributeError, "has no attribute 'gradient_checkpointing_enable': pass remat=True to fully_shard",
    "The method of Hugging Face came after `make_functional`, which had copied the module.",
    "Pass `remat=True`, or the names of units, to `fs.fully_shard`.",
    lambda s: s.sharded.gradient_checkpointing_enable(),
)  # fmt: skip


def sharded_method(s):
    net = copy.deepcopy(NET)
    net.__class__ = type("Generates", (nn.Sequential,), {"generate": lambda self: self[0].weight})
    apply, params, _ = fs.make_functional(net)
    return fs.fully_shard(apply, fs.make_plan(params, s.mesh), s.mesh)


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
    SHARDS, ValueError, "this is a state, whose shards are an entry of it: pass state.shards",
    "`fs.gather(state, plan, mesh)`, or a call such as `sharded(state, ...)`, got the whole training state.",
    "Pass `state.shards`.",
    lambda s: fs.gather(s.step().init(s.shards, BUFFERS), s.plan, s.mesh),
)  # fmt: skip
mistake(
    SHARDS, ValueError, "this is the shard of one unit; pass the dictionary with the shards of all units",
    "`fs.gather(shards['0'], plan, mesh)` got a part of the shards.",
    "Pass all `shards`, and take `params['0.weight']` of the result.",
    lambda s: fs.gather(s.shards["0"], s.plan, s.mesh),
)  # fmt: skip
mistake(
    SHARDS, AttributeError, "a training state has no attribute 'params': the parameters are state.shards",
    "`state.params`, `state.model` and `state.optimizer` are names of other libraries.",
    "Use `state.shards`, `state.buffers` and `state.opt_state`.",
    lambda s: s.step().init(s.shards, BUFFERS).params,
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
    lambda s: torch.optim.AdamW(s.sharded.parameters()),
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
mistake(
    GRADIENTS, TypeError, "returns a loss; found Tensor: pass the function that computes the loss, not its result",
    "`fs.value_and_grad(loss_fn(shards))` got the loss itself.",
    "Write `fs.value_and_grad(loss_fn)(shards)`.",
    lambda s: fs.value_and_grad(s.loss(s.shards, s.x)),
)  # fmt: skip
mistake(
    GRADIENTS, TypeError, "a number without a gradient: return the tensor, without .item()",
    "The loss function returns `loss.item()`, which is a number of Python.",
    "Return the tensor.",
    lambda s: fs.value_and_grad(lambda shards: s.loss(shards, s.x).item())(s.shards),
)  # fmt: skip
mistake(
    GRADIENTS, TypeError, "found None: end loss_fn with return loss",
    "The loss function computes a loss, and returns nothing.",
    "End it with `return loss`.",
    lambda s: fs.value_and_grad(lambda shards: None)(s.shards),
)  # fmt: skip
mistake(
    GRADIENTS, TypeError, "found dict: return the loss alone, or (loss, aux) with has_aux=True",
    "The loss function returns a dictionary of values, as training steps of other libraries do.",
    "Pass `has_aux=True` and return `(loss, {...})`; the dictionary is `metrics['aux']`.",
    lambda s: fs.value_and_grad(lambda shards: {"loss": s.loss(shards, s.x)})(s.shards),
)  # fmt: skip
mistake(
    GRADIENTS, TypeError, "found ModelOutput: return its .loss",
    "The loss function returns the whole output of a model of Hugging Face.",
    "Return `output.loss`.",
    lambda s: fs.value_and_grad(lambda shards: ModelOutput(s.loss(shards, s.x)))(s.shards),
)  # fmt: skip
mistake(
    GRADIENTS, ValueError, "value_and_grad returns (loss, grads), and a step (state, metrics), in this order",
    "`grads, loss = fs.value_and_grad(loss_fn)(shards)` has the results in the wrong order.",
    "Write `loss, grads = ...`, as in JAX.",
    lambda s: fs.gather(fs.value_and_grad(s.loss)(s.shards, s.x)[0], s.plan, s.mesh),
)  # fmt: skip
mistake(
    GRADIENTS, AttributeError, "'str' object has no attribute 'grad'",
    "`torch.nn.utils.clip_grad_norm_(grads, 1.0)` expects parameters with `.grad`, and knows one rank alone.",
    "Pass `max_norm=1.0` to `make_train_step`, or call `fs.clip_by_global_norm(grads, plan, mesh, 1.0)`.",
    lambda s: nn.utils.clip_grad_norm_(s.grads(), 1.0),
)  # fmt: skip
mistake(
    GRADIENTS, ValueError, "found ['Batch']: pass dict(batch)",
    "`accumulate=` has to split a batch of a class of its own, such as Hugging Face's `BatchEncoding`.",
    "Pass `dict(batch)` to the step.",
    lambda s: fs.accumulate(lambda shards, batch: s.loss(shards, batch["x"]), 2)(s.shards, Batch(x=s.x)),
)  # fmt: skip


@dataclass
class ModelOutput:
    loss: torch.Tensor


class Batch(UserDict):
    """A mapping that is no dictionary, as Hugging Face's ``BatchEncoding`` is."""


def backward(loss):
    loss.backward()
    return loss
