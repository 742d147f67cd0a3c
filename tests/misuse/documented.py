"""The mistakes on the page "Common mistakes": each with its message, what you did, and what to do.

``python -m tests.misuse`` writes that part of ``docs/mistakes.md``.
"""

import copy
import functools
import io
from collections import UserDict
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import funcshard as fs
from tests.misuse import BUFFERS, DATA, NET, PARAMS, Table

CASES = Table()
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW

# --- modules --------------------------------------------------------------------------------------

CASES.section = "Modules and their functions"
MADE = "Call `apply, params, buffers = fs.make_functional(net)`"

CASES += [
    ("fully_shard", "You passed the module itself to `fully_shard`.",
     TypeError("fully_shard takes the apply that make_functional returned; found a module"),
     lambda s: fs.fully_shard(NET, s.plan, s.mesh), f"{MADE}, and pass `apply`."),
    ("fully_shard", "You passed all three results of `fs.make_functional(net)`.",
     TypeError("found all that it returned, a tuple"), lambda s: fs.fully_shard(fs.make_functional(NET), s.plan, s.mesh),
     "Unpack them into `apply, params, buffers`, and pass `apply`."),
    ("fully_shard", "You left out the parentheses.",
     TypeError("found the method eval: call it, as in apply.eval()"),
     lambda s: fs.fully_shard(fs.make_functional(NET)[0].eval, s.plan, s.mesh),
     "Write `fs.fully_shard(apply.eval(), plan, mesh)`."),
    ("make_plan", "You passed the module itself to `make_plan`.",
     TypeError("leaf '' must be a torch.Tensor; found Sequential"), lambda s: fs.make_plan(NET, s.mesh),
     f"{MADE}, and pass `params`."),
    ("unshard", "You passed a module to `unshard`.",
     TypeError("unshard takes a function of leaves; found a module with its own parameters"),
     lambda s: fs.unshard(NET, s.plan.units["0"], s.mesh),
     "Pass a function of leaves, e.g. the `apply` of `fs.make_functional(block)`."),
    ("init_shards", "You passed the module itself.",
     TypeError("init_shards takes a function init(unit)"), lambda s: fs.init_shards(NET, s.plan, s.mesh),
     "For a module on meta, call `fs.init_module(net, plan, mesh)`."),
    ("make_functional", "You passed the module's class.",
     TypeError("make_functional takes a torch.nn.Module; found the class Linear"), lambda s: fs.make_functional(nn.Linear),
     "Pass an instance: `fs.make_functional(Net())`."),
    ("fully_shard", "`fs.fully_shard(block)` is FSDP2's call.",
     TypeError("fully_shard() missing 2 required positional arguments: 'plan' and 'mesh'"), lambda s: fs.fully_shard(NET[0]),
     f"{MADE} and `plan = fs.make_plan(params, mesh, units=['blocks.*'])`, then `fs.fully_shard(apply, plan, mesh)` once."),
    ("fully_shard", "You passed an option of FSDP2's `fully_shard`.",
     TypeError("fully_shard() got an unexpected keyword argument 'reshard_after_forward'"),
     lambda s: fs.fully_shard(fs.make_functional(NET)[0], s.plan, s.mesh, reshard_after_forward=False),
     "Pass `reshard_after_forward=`, `precision=fs.MixedPrecision(...)` and `offload=` to `fs.make_plan`."),
    ("make_functional",
     "Your module is in DistributedDataParallel or DataParallel, or FSDP2 has sharded it.",
     TypeError("module '(root)' is parallelized by DataParallel"), lambda s: fs.make_functional(nn.DataParallel(NET)),
     "Pass the plain module, e.g. `ddp.module`."),
    ("make_plan", "`'hybrid_shard'` is FSDP's name; here the mesh says which ranks hold copies.",
     ValueError("found 'hybrid_shard': pass a mesh of two axes"),
     lambda s: fs.make_plan(PARAMS, s.mesh, strategy="hybrid_shard"),
     "Pass a mesh such as `fs.init_mesh({'replicate': 2, 'shard': 8})`, and `strategy='full_shard'`."),
    ("make_plan", "Your layers are deeper in the module, as in `model.layers`, or under a prefix of peft.",
     ValueError("unit 'layers.*' matches no part of the tree"),
     lambda s: fs.make_plan({"model": {"layers": [PARAMS, PARAMS]}}, s.mesh, units=["layers.*"]),
     "Write the path that the message proposes, e.g. `units=['model.layers.*']`."),
    ("make_plan", "`units=['blocks']` makes one unit of all layers, so each rank gathers the whole model at once.",
     UserWarning("and each call gathers all of them at once: write units=['blocks.*']"),
     lambda s: fs.make_plan({"blocks": [{"w": torch.empty(2**14, 2**14, device="meta")} for _ in "ab"]}, 2,
        units=["blocks"]), "Write `units=['blocks.*']`."),
    ("wrap.by_class", "You passed the module among the classes.",
     TypeError("by_class takes one or more subclasses of torch.nn.Module; found Sequential"),
     lambda s: fs.wrap.by_class(NET, nn.Linear), "Write `fs.wrap.by_class(Block)(net)`."),
]  # fmt: skip
for words, change, cause, cure in (
    ("train() or eval() was called", nn.Module.eval,
     "You called `net.eval()` after `make_functional`, which copies the module.",
     "Pass `apply.eval()` to `fully_shard`, and call it with the same shards."),
    ("parameters were frozen or unfrozen", lambda net: net.requires_grad_(False),
     "You froze parameters after `make_functional`, which copies the module.",
     "Freeze first, then call `make_functional` and `make_plan`."),
    ("its parameters were written", lambda net: net.load_state_dict(net.state_dict()),
     "You loaded or trained `net` after `make_functional`, which copies it.",
     "Load first, or call `fs.from_state_dict(state_dict, plan, mesh)`."),
):  # fmt: skip
    CASES += [
        ("fully_shard", cause, UserWarning(f"was changed after make_functional had copied it: {words}"),
         lambda s, change=change: shard_after(s, change), cure),
    ]  # fmt: skip
CASES += [
    ("fully_shard", "A function has one mode.",
     AttributeError("a function of fully_shard has no attribute 'eval'"), lambda s: s.sharded.eval(),
     "For evaluation, call `fs.fully_shard(apply.eval(), plan, mesh)`."),
    ("fully_shard", "You called a method of the module on the sharded function.",
     AttributeError("has no attribute 'generate': it is a method of the module"), lambda s: sharded_method(s).generate(),
     "Shard the method: `fs.fully_shard(apply.method('generate'), plan, mesh)`."),
    ("fully_shard", "You called a Hugging Face method on the sharded function.",
     AttributeError("has no attribute 'gradient_checkpointing_enable': pass remat=True to fully_shard"),
     lambda s: s.sharded.gradient_checkpointing_enable(), "Pass `remat=True`, or the names of units, to `fs.fully_shard`."),
]  # fmt: skip


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

CASES.section = "Parameters and shards"

CASES += [
    ("fully_shard", "You passed whole parameters to `sharded`.",
     ValueError("these are whole parameters; cut them first with shards = fs.shard(params, plan, mesh)"),
     lambda s: s.sharded(PARAMS, BUFFERS, s.x), "Call `shards = fs.shard(params, plan, mesh)` once, and pass `shards`."),
    ("gather", "You passed the whole training state to `fs.gather`, or to a call such as `sharded(state, ...)`.",
     ValueError("this is a state, whose shards are an entry of it: pass state.shards"),
     lambda s: fs.gather(s.step().init(s.shards, BUFFERS), s.plan, s.mesh), "Pass `state.shards`."),
    ("gather", "You passed `shards['0']`.",
     ValueError("this is the shard of one unit; pass the dictionary with the shards of all units"),
     lambda s: fs.gather(s.shards["0"], s.plan, s.mesh), "Pass all `shards`, and take `params['0.weight']` of the result."),
    ("TrainState", "`state.params`, `state.model` and `state.optimizer` are names of other libraries.",
     AttributeError("a training state has no attribute 'params': the parameters are state.shards"),
     lambda s: s.step().init(s.shards, BUFFERS).params, "Use `state.shards`, `state.buffers` and `state.opt_state`."),
    ("make_functional", "You passed shards to `apply`, which takes whole parameters.",
     ValueError("these are shards: call the function of fully_shard"),
     lambda s: fs.make_functional(NET)[0](s.shards, BUFFERS, s.x),
     "Call the function that `fs.fully_shard(apply, plan, mesh)` returned."),
    ("fully_shard", "A function has no `.parameters()`; your parameters are the shards.",
     AttributeError("a function of fully_shard has no attribute 'parameters'"),
     lambda s: torch.optim.AdamW(s.sharded.parameters()),
     "Make the optimizer with `fs.torch_optimizer`, and call `step.init(shards, buffers)`."),
]  # fmt: skip

# --- gradients ------------------------------------------------------------------------------------

CASES.section = "Losses and backward"

CASES += [
    ("value_and_grad",
     "You called `loss.backward()`. Shards are plain tensors, and `.grad` is never set.",
     RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"),
     lambda s: s.loss(s.shards, s.x).backward(),
     "Call `fs.value_and_grad(loss_fn)(shards, ...)`, which returns the gradients, or a training step."),
    ("value_and_grad", "Your loss function calls `loss.backward()`, which frees the graph that `value_and_grad` needs.",
     RuntimeError("If loss_fn calls loss.backward(), leave that out"),
     lambda s: fs.value_and_grad(lambda shards: backward(s.loss(shards, s.x)))(s.shards), "Just return the loss."),
    ("value_and_grad", "You passed a module.",
     TypeError("value_and_grad takes a function loss_fn(shards, ...) that returns a loss; found a module"),
     lambda s: fs.value_and_grad(NET), "Write a loss function that calls the function of `fully_shard`."),
    ("value_and_grad", "You passed the loss itself.",
     TypeError("returns a loss; found Tensor: pass the function that computes the loss, not its result"),
     lambda s: fs.value_and_grad(s.loss(s.shards, s.x)), "Write `fs.value_and_grad(loss_fn)(shards)`."),
    ("value_and_grad", "Your loss function returns `loss.item()`, a Python number.",
     TypeError("a number without a gradient: return the tensor, without .item()"),
     lambda s: fs.value_and_grad(lambda shards: s.loss(shards, s.x).item())(s.shards), "Return the tensor."),
    ("value_and_grad", "Your loss function returns nothing.",
     TypeError("found None: end loss_fn with return loss"), lambda s: fs.value_and_grad(lambda shards: None)(s.shards),
     "End it with `return loss`."),
    ("value_and_grad", "Your loss function returns a dictionary, as in other libraries.",
     TypeError("found dict: return the loss alone, or (loss, aux) with has_aux=True"),
     lambda s: fs.value_and_grad(lambda shards: {"loss": s.loss(shards, s.x)})(s.shards),
     "Pass `has_aux=True` and return `(loss, {...})`; a step reports the dictionary as `metrics['aux']`."),
    ("value_and_grad", "Your loss function returns the whole output of a Hugging Face model.",
     TypeError("found ModelOutput: return its .loss"),
     lambda s: fs.value_and_grad(lambda shards: ModelOutput(s.loss(shards, s.x)))(s.shards), "Return `output.loss`."),
    ("gather", "You unpacked the results in the wrong order.",
     ValueError("value_and_grad returns (loss, grads), and a step (state, metrics), in this order"),
     lambda s: fs.gather(fs.value_and_grad(s.loss)(s.shards, s.x)[0], s.plan, s.mesh),
     "Write `loss, grads = ...`, as in JAX."),
    ("clip_by_global_norm",
     "`torch.nn.utils.clip_grad_norm_` expects parameters with `.grad`, and sees one rank only.",
     AttributeError("'str' object has no attribute 'grad'"), lambda s: nn.utils.clip_grad_norm_(s.grads(), 1.0),
     "Pass `max_norm=1.0` to `make_train_step`, or call `fs.clip_by_global_norm(grads, plan, mesh, 1.0)`."),
    ("accumulate", "`accumulate=` can't split a batch of another class, such as Hugging Face's `BatchEncoding`.",
     ValueError("found ['Batch']: pass dict(batch)"),
     lambda s: fs.accumulate(lambda shards, batch: s.loss(shards, batch["x"]), 2)(s.shards, Batch(x=s.x)),
     "Pass `dict(batch)`."),
]  # fmt: skip


@dataclass
class ModelOutput:
    loss: torch.Tensor


class Batch(UserDict):
    """A mapping that is no dictionary, as Hugging Face's ``BatchEncoding`` is."""


def backward(loss):
    loss.backward()
    return loss


# --- optimizers and steps -------------------------------------------------------------------------

CASES.section = "Optimizers and training steps"

CASES += [
    ("torch_optimizer", "You passed shards, a dictionary, to an optimizer of torch.",
     TypeError("optimizer can only optimize Tensors, but one of the params is str"), lambda s: ADAMW(s.shards, lr=1e-3),
     "Call `fs.torch_optimizer(torch.optim.AdamW, lr=1e-3)`, and pass the shards to `step.init`."),
    ("torch_optimizer", "You passed the shards to `torch_optimizer`.",
     TypeError("torch_optimizer() takes 1 positional argument but 2 were given"),
     lambda s: fs.torch_optimizer(ADAMW, s.shards, lr=1e-3),
     "Pass them to `step.init(shards, buffers)`, or to `optimizer.init(shards)`."),
    ("torch_optimizer", "You passed the name of a class.",
     TypeError("takes a class of optimizers that updates each element by itself…; found 'adamw', known are"),
     lambda s: fs.torch_optimizer("adamw", lr=1e-3), "Pass the class, `torch.optim.AdamW`."),
    ("torch_optimizer", "An optimizer here holds no gradients or parameters.",
     TypeError("missing 3 required positional arguments: 'grads', 'state', and 'params'"),
     lambda s: fs.torch_optimizer(SGD, lr=0.1).step(),
     "Let `make_train_step` call it, or write `params, state = optimizer.step(grads, state, params)`."),
    ("make_train_step", "You passed a class of torch to `make_train_step`.",
     TypeError("found 'AdamW': pass fs.torch_optimizer(torch.optim.AdamW, lr=...)"), lambda s: s.step(ADAMW),
     "Pass `fs.torch_optimizer(torch.optim.AdamW, lr=1e-3)`."),
    ("torch_optimizer",
     "You passed an optimizer of the module's parameters.",
     TypeError("found an instance of AdamW…: pass torch_optimizer(torch.optim.AdamW, lr=...)"),
     lambda s: fs.torch_optimizer(ADAMW(NET.parameters())),
     "Pass the class and its options; `step.init(shards, buffers)` makes the state."),
    ("torch_optimizer", "`torch.optim.Muon` would orthogonalise slices of matrices.",
     ValueError("call fs.muon(plan, mesh, lr=...), which updates whole matrices"),
     lambda s: fs.torch_optimizer(torch.optim.Muon), "Call `fs.muon(plan, mesh, lr=...)`."),
    ("torch_optimizer", "You misspelled an option, or used another library's name for it.",
     TypeError("AdamW does not take the options: got an unexpected keyword argument 'learning_rate'"),
     lambda s: fs.torch_optimizer(ADAMW, learning_rate=1e-3), "Use the names of the class in `torch.optim`."),
    ("torch_optimizer", "You passed the optimizer to a scheduler of torch, which wants to change it.",
     TypeError("TorchOptimizer is not an Optimizer"),
     lambda s: schedulers.CosineAnnealingLR(fs.torch_optimizer(ADAMW, lr=1e-3), T_max=100),
     "Pass `lr=fs.torch_schedule(CosineAnnealingLR, lr=1e-3, T_max=100)` to `fs.torch_optimizer`."),
    ("torch_optimizer",
     "You passed a scheduler object as `lr`.",
     TypeError("pass lr=fs.torch_schedule(CosineAnnealingLR, lr=..., ...)"),
     lambda s: fs.torch_optimizer(ADAMW, lr=schedulers.CosineAnnealingLR(ADAMW(NET.parameters()), T_max=100)),
     "Pass `lr=fs.torch_schedule(CosineAnnealingLR, lr=1e-3, T_max=100)`."),
    ("torch_schedule", "A schedule is a function of the step, so you don't call `scheduler.step()`.",
     AttributeError("a schedule of torch_schedule has no attribute 'step': leave it out"),
     lambda s: fs.torch_schedule(schedulers.CosineAnnealingLR, lr=1e-3, T_max=100).step(),
     "Leave it out, and read `metrics['lr']` instead of `scheduler.get_last_lr()`."),
    ("torch_optimizer",
     "You passed a `functools.partial` of the class.",
     ValueError("pass the class itself, and its options by name"),
     lambda s: fs.torch_optimizer(functools.partial(ADAMW, lr=1e-3)),
     "Write `fs.torch_optimizer(torch.optim.AdamW, lr=1e-3)`."),
    ("torch_optimizer", "You can't change the learning rate in place.",
     AttributeError("an optimizer of torch_optimizer or muon has no attribute 'param_groups'"),
     lambda s: fs.torch_optimizer(SGD, lr=0.1).param_groups,
     "Pass `lr=` as a function of the step, and read `metrics['lr']`."),
    ("torch_optimizer", "There's no `.grad` to reset.",
     AttributeError("an optimizer of torch_optimizer or muon has no attribute 'zero_grad'"),
     lambda s: fs.torch_optimizer(SGD, lr=0.1).zero_grad(),
     "Leave it out: each call of `value_and_grad` returns new gradients."),
    ("torch_optimizer",
     "An optimizer holds no state; it's in `state.opt_state`.",
     AttributeError("an optimizer of torch_optimizer or muon has no attribute 'state_dict'"),
     lambda s: fs.torch_optimizer(SGD, lr=0.1).state_dict(),
     "Call `fs.save(path, state, plan, mesh)`, or `fs.optimizer_to_state_dict` for a state dict of torch."),
    ("make_train_step", "You passed torch's scaler.",
     TypeError("found torch's GradScaler, which keeps its scale to itself"),
     lambda s: s.step(scaler=torch.amp.GradScaler("cpu", enabled=False)), "Pass `scaler=fs.GradScaler()`."),
    ("GradScaler", "A training step scales and unscales for you.",
     AttributeError("a GradScaler has no attribute 'step': make_train_step(..., scaler=) does it"),
     lambda s: fs.GradScaler().step(fs.torch_optimizer(SGD, lr=0.1)), "Pass `scaler=fs.GradScaler()` to `make_train_step`."),
    ("make_train_step", "You passed a state of AdamW to a step with SGD.",
     ValueError("is not one of torch_optimizer(SGD): it must hold nothing; found ['exp_avg',"),
     lambda s: s.step()(stepped(s, fs.torch_optimizer(ADAMW, lr=1e-3)), s.x),
     "Make a new state with `optimizer.init(shards)`, or keep the optimizer that made the state."),
    ("make_train_step", "You passed a module.",
     TypeError("loss_fn must be a function loss_fn(shards, buffers, batch); found Sequential"),
     lambda s: s.step(loss_fn=NET),
     "Pass a function that calls the function of `fully_shard` and returns the loss."),
    ("make_train_step", "A step's loss function takes three arguments, even if your model has no buffers.",
     TypeError("loss_fn must be a function loss_fn(shards, buffers, batch); found one of (shards, batch)"),
     lambda s: s.step(loss_fn=lambda shards, batch: s.loss(shards, batch)), "Write `lambda shards, buffers, batch: ...`."),
    ("make_train_step", "You swapped the arguments.",
     TypeError("loss_fn must be a function loss_fn(shards, buffers, batch); found TorchOptimizer"),
     lambda s: s.step(s.loss_of_step, fs.torch_optimizer(SGD, lr=0.1)),
     "Write `fs.make_train_step(loss_fn, optimizer, plan, mesh)`."),
    ("make_train_step", "You kept the pair that a step returns as the state.",
     TypeError("found tuple: write state, metrics = step(state, batch)"),
     lambda s: s.step()(s.step()(s.step().init(s.shards, BUFFERS), s.x), s.x),
     "Write `state, metrics = step(state, batch)`."),
    ("make_train_step", "You passed shards to the step.",
     TypeError("found dict: make the state with step.init(shards, buffers)"), lambda s: s.step()(s.shards, s.x),
     "Call `state = step.init(shards, buffers)` once before the loop."),
    ("make_train_step", "You saved a dictionary, so `fs.restore` returns one.",
     TypeError("found dict: pass its entry 'train'"),
     lambda s: s.step()({"train": s.step().init(s.shards, BUFFERS), "epoch": 3}, s.x),
     "Write `saved = fs.restore(...)`, and pass `saved['train']`."),
    ("make_train_step",
     "You passed a whole DataLoader, or `accumulate=` can't split an array or an object.",
     ValueError("pass one batch as a tensor, or as a tuple or dictionary of tensors"),
     lambda s: s.step(accumulate=2)(s.step().init(s.shards, BUFFERS), [s.x.numpy()]),
     "Write `for batch in loader: state, metrics = step(state, batch)`, with tensors in `batch`."),
    ("make_train_step", "You called `step.backward()`, as in other engines.",
     AttributeError("a training step has no attribute 'backward'"), lambda s: s.step().backward(),
     "Call `state, metrics = step(state, batch)`, which runs forward, backward and the optimizer."),
]  # fmt: skip


def stepped(s, optimizer):
    step = s.step(optimizer)
    return step(step.init(s.shards, BUFFERS), s.x)[0]


# --- state dicts and checkpoints ------------------------------------------------------------------

CASES.section = "State dicts and checkpoints"

CASES += [
    ("from_state_dict", "Your state dict is of a larger model, or its names differ from the plan's.",
     UserWarning("the state dict holds ['9.weight'], which aren't leaves of the plan and were left out"),
     lambda s: fs.from_state_dict({**PARAMS, "9.weight": torch.ones(2)}, s.plan, s.mesh),
     "Make the plan from the params of the same module, or delete these names from the state dict."),
    ("from_state_dict", "Your state dict comes from DistributedDataParallel or a compiled module.",
     ValueError("under names that carry the prefix 'module.' that has to be removed"),
     lambda s: fs.from_state_dict({f"module.{name}": leaf for name, leaf in PARAMS.items()}, s.plan, s.mesh),
     "Remove the prefix with the function that the message names."),
    ("from_state_dict", "Your file holds a state dict among other things, e.g. the epoch.",
     ValueError("its entry 'model' is a state dict that holds them: pass state_dict['model']"),
     lambda s: fs.from_state_dict({"model": PARAMS, "epoch": 3}, s.plan, s.mesh), "Pass the entry that the message names."),
    ("from_state_dict", "You passed a path.",
     TypeError("a state dict must be a dictionary {name: tensor}; found str"),
     lambda s: fs.from_state_dict("model.pt", s.plan, s.mesh),
     "Pass `torch.load(path, weights_only=True)`, or call `fs.import_safetensors(path, plan, mesh)`."),
    ("from_state_dict", "You passed a module.",
     TypeError("a state dict must be a dictionary {name: tensor}; found Sequential"),
     lambda s: fs.from_state_dict(NET, s.plan, s.mesh), "Pass `net.state_dict()`."),
    ("save", "You passed the arguments in the order of `torch.save`.",
     TypeError("path must be a path, as text or a pathlib.Path; found TrainState"),
     lambda s: fs.save(s.step().init(s.shards, BUFFERS), "step-1", s.plan, s.mesh),
     "Write `fs.save(path, state, plan, mesh)`."),
    ("save_pretrained", "You passed the sharded function.",
     TypeError("save_pretrained takes the apply of a model of Hugging Face; found FullyShard"),
     lambda s: fs.save_pretrained("model", s.sharded, s.shards, s.plan, s.mesh),
     "Pass the `apply` that `fs.from_pretrained` or `fs.make_functional` returned."),
    ("to_state_dict", "You loaded one rank's shards, under the names of units.",
     RuntimeError('Unexpected key(s) in state_dict: "", "0", "2"'), lambda s: copy.deepcopy(NET).load_state_dict(s.shards),
     "Call `net.load_state_dict(fs.to_state_dict(shards, plan, mesh))`, `to_state_dict` on every rank."),
    ("restore", "You passed a file of `torch.save` to `fs.restore`.",
     FileNotFoundError("which is a file, and save makes a folder"), lambda s: fs.restore(__file__, s.plan, s.mesh),
     "Pass `torch.load(path, weights_only=True)` to `fs.from_state_dict`."),
    ("TrainState",
     "You saved a state with `torch.save`, which stores one rank's shards only.",
     Exception("Weights only load failed"), lambda s: torch.load(saved(s.step().init(s.shards, BUFFERS))),
     "Use `fs.save(path, state, plan, mesh)` and `fs.restore(path, plan, mesh)`, which fit any number of ranks."),
    ("fully_shard", "You tried to save `sharded`, which holds this rank's connections.",
     TypeError("a function that fully_shard returned cannot be pickled"), lambda s: saved(s.sharded),
     "Call `fs.save(path, state, plan, mesh)`, or save `fs.to_state_dict(shards, plan, mesh)`."),
    ("make_train_step", "You tried to save functions and connections.",
     TypeError("a training step cannot be pickled"), lambda s: saved(s.step()),
     "Call `fs.save(path, state, plan, mesh)`."),
    ("Mesh", "You saved a dictionary with the mesh in it, or sent it to another process.",
     TypeError("a mesh cannot be pickled"), lambda s: saved({"mesh": s.mesh}),
     "Leave the mesh out, and call `fs.init_mesh()` in each process."),
    ("copy",
     "You used a state, e.g. in `copy.deepcopy(state)`, after a step had taken it.",
     RuntimeError("this tensor was donated to a training step"), lambda s: copy.deepcopy(donated(s)),
     "Use the state that the step returned, or call `fs.copy(state)` before the step."),
]  # fmt: skip


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


# --- ranks ----------------------------------------------------------------------------------------

CASES.section = "Ranks and meshes"

CASES += [
    ("simulate", "You called a collective on one rank, as in `if mesh.rank == 0: fs.to_state_dict(...)`.",
     RuntimeError("every rank has to call the same functions in the same order, even if one rank alone uses a result"),
     lambda s: fs.simulate(lambda mesh: None if mesh.rank else fs.psum(DATA, mesh), world_size=2),
     "Call it on every rank, and write the result on rank 0. See [debugging a hang](hanging.md)."),
    ("init_mesh", "You passed the device as the first argument, as in `init_device_mesh`.",
     TypeError("found 'cuda': pass the device by keyword, as in init_mesh(device='cuda')"), lambda s: fs.init_mesh("cuda"),
     "Call `fs.init_mesh()`, which takes CUDA if there is a GPU, or `fs.init_mesh(device='cuda')`."),
    ("Mesh", "You called a method of torch's DeviceMesh.",
     AttributeError("a mesh has no attribute 'get_rank': this rank's number is mesh.rank"), lambda s: s.mesh.get_rank(),
     "Use `mesh.rank`, `mesh.world_size` and `mesh.position['shard']`."),
    ("Mesh", "You passed a shape.",
     TypeError("device_mesh must be a torch.distributed DeviceMesh; found tuple"),
     lambda s: fs.Mesh.from_device_mesh((2, 4)), "Call `fs.init_mesh({'replicate': 2, 'shard': 4})`."),
    ("psum", "You swapped the arguments.",
     TypeError("the tensor comes before the mesh, as in psum(x, mesh)"), lambda s: fs.psum(s.mesh, s.x),
     "Write `fs.psum(x, mesh)`."),
]  # fmt: skip
