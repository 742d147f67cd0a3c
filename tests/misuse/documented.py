"""What raises each message of the page "Common mistakes", by its words."""

import builtins
import copy
import functools
import io
import re
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import funcshard as fs
from tests.misuse import BUFFERS, DATA, NET, PARAMS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mistakes.md"
MESSAGES = re.findall(r"^- `(\w+): (.*)`$", PAGE.read_text(), re.MULTILINE)  # the class of an error, and words of it
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
LARGE = torch.empty(2**14, 2**14, device="meta")


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


@dataclass
class ModelOutput:
    loss: torch.Tensor


class Batch(UserDict):
    """A mapping that is no dictionary, as Hugging Face's ``BatchEncoding`` is."""


def backward(loss):
    loss.backward()
    return loss


def stepped(s, optimizer):
    step = s.step(optimizer)
    return step(step.init(s.shards, BUFFERS), s.x)[0]


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


PROGRAMS = {
    # Modules and their functions
    "fully_shard takes the apply that make_functional returned; found a module":
        lambda s: fs.fully_shard(NET, s.plan, s.mesh),
    "found all that it returned, a tuple": lambda s: fs.fully_shard(fs.make_functional(NET), s.plan, s.mesh),
    "found the method eval: call it, as in apply.eval()":
        lambda s: fs.fully_shard(fs.make_functional(NET)[0].eval, s.plan, s.mesh),
    "leaf '' must be a torch.Tensor; found Sequential": lambda s: fs.make_plan(NET, s.mesh),
    "unshard takes a function of leaves; found a module with its own parameters":
        lambda s: fs.unshard(NET, s.plan.units["0"], s.mesh),
    "init_shards takes a function init(unit)": lambda s: fs.init_shards(NET, s.plan, s.mesh),
    "make_functional takes a torch.nn.Module; found the class Linear": lambda s: fs.make_functional(nn.Linear),
    "fully_shard() missing 2 required positional arguments: 'plan' and 'mesh'": lambda s: fs.fully_shard(NET[0]),
    "fully_shard() got an unexpected keyword argument 'reshard_after_forward'":
        lambda s: fs.fully_shard(fs.make_functional(NET)[0], s.plan, s.mesh, reshard_after_forward=False),
    "module '(root)' is parallelized by DataParallel": lambda s: fs.make_functional(nn.DataParallel(NET)),
    "found 'hybrid_shard': pass a mesh of two axes": lambda s: fs.make_plan(PARAMS, s.mesh, strategy="hybrid_shard"),
    "unit 'layers.*' matches no part of the tree":
        lambda s: fs.make_plan({"model": {"layers": [PARAMS, PARAMS]}}, s.mesh, units=["layers.*"]),
    "and each call gathers all of them at once: write units=['blocks.*']":
        lambda s: fs.make_plan({"blocks": [{"w": LARGE}, {"w": LARGE.clone()}]}, 2, units=["blocks"]),
    "by_class takes one or more subclasses of torch.nn.Module; found Sequential": lambda s: fs.wrap.by_class(NET, nn.Linear),
    "was changed after make_functional had copied it: train() or eval() was called":
        lambda s: shard_after(s, nn.Module.eval),
    "was changed after make_functional had copied it: parameters were frozen or unfrozen":
        lambda s: shard_after(s, lambda net: net.requires_grad_(False)),
    "was changed after make_functional had copied it: its parameters were written":
        lambda s: shard_after(s, lambda net: net.load_state_dict(net.state_dict())),
    "a function of fully_shard has no attribute 'eval'": lambda s: s.sharded.eval(),
    "has no attribute 'generate': it is a method of the module": lambda s: sharded_method(s).generate(),
    "has no attribute 'gradient_checkpointing_enable': pass remat=True to fully_shard":
        lambda s: s.sharded.gradient_checkpointing_enable(),
    # Parameters and shards
    "these are whole parameters; cut them first with shards = fs.shard(params, plan, mesh)":
        lambda s: s.sharded(PARAMS, BUFFERS, s.x),
    "this is a state, whose shards are an entry of it: pass state.shards": lambda s: fs.gather(s.state(), s.plan, s.mesh),
    "this is the shard of one unit; pass the dictionary with the shards of all units":
        lambda s: fs.gather(s.shards["0"], s.plan, s.mesh),
    "a training state has no attribute 'params': the parameters are state.shards": lambda s: s.state().params,
    "these are shards: call the function of fully_shard": lambda s: fs.make_functional(NET)[0](s.shards, BUFFERS, s.x),
    "a function of fully_shard has no attribute 'parameters'": lambda s: torch.optim.AdamW(s.sharded.parameters()),
    # Losses and backward
    "element 0 of tensors does not require grad and does not have a grad_fn": lambda s: s.loss(s.shards, s.x).backward(),
    "If loss_fn calls loss.backward(), leave that out":
        lambda s: fs.value_and_grad(lambda shards: backward(s.loss(shards, s.x)))(s.shards),
    "value_and_grad takes a function loss_fn(shards, ...) that returns a loss; found a module":
        lambda s: fs.value_and_grad(NET),
    "returns a loss; found Tensor: pass the function that computes the loss, not its result":
        lambda s: fs.value_and_grad(s.loss(s.shards, s.x)),
    "a number without a gradient: return the tensor, without .item()":
        lambda s: fs.value_and_grad(lambda shards: s.loss(shards, s.x).item())(s.shards),
    "found None: end loss_fn with return loss": lambda s: fs.value_and_grad(lambda shards: None)(s.shards),
    "found dict: return the loss alone, or (loss, aux) with has_aux=True":
        lambda s: fs.value_and_grad(lambda shards: {"loss": s.loss(shards, s.x)})(s.shards),
    "found ModelOutput: return its .loss":
        lambda s: fs.value_and_grad(lambda shards: ModelOutput(s.loss(shards, s.x)))(s.shards),
    "value_and_grad returns (loss, grads), and a step (state, metrics), in this order":
        lambda s: fs.gather(fs.value_and_grad(s.loss)(s.shards, s.x)[0], s.plan, s.mesh),
    "'str' object has no attribute 'grad'": lambda s: nn.utils.clip_grad_norm_(s.grads(), 1.0),
    "found ['Batch']: pass dict(batch)":
        lambda s: fs.accumulate(lambda shards, batch: s.loss(shards, batch["x"]), 2)(s.shards, Batch(x=s.x)),
    # Optimizers and training steps
    "optimizer can only optimize Tensors, but one of the params is str": lambda s: ADAMW(s.shards, lr=1e-3),
    "torch_optimizer() takes 1 positional argument but 2 were given": lambda s: fs.torch_optimizer(ADAMW, s.shards, lr=1e-3),
    "takes a class of optimizers that updates each element by itself…; found 'adamw', known are":
        lambda s: fs.torch_optimizer("adamw", lr=1e-3),
    "missing 3 required positional arguments: 'grads', 'state', and 'params'":
        lambda s: fs.torch_optimizer(SGD, lr=0.1).step(),
    "found 'AdamW': pass fs.torch_optimizer(torch.optim.AdamW, lr=...)": lambda s: s.step(ADAMW),
    "found an instance of AdamW…: pass torch_optimizer(torch.optim.AdamW, lr=...)":
        lambda s: fs.torch_optimizer(ADAMW(NET.parameters())),
    "call fs.muon(plan, mesh, lr=...), which updates whole matrices": lambda s: fs.torch_optimizer(torch.optim.Muon),
    "AdamW does not take the options: got an unexpected keyword argument 'learning_rate'":
        lambda s: fs.torch_optimizer(ADAMW, learning_rate=1e-3),
    "TorchOptimizer is not an Optimizer":
        lambda s: schedulers.CosineAnnealingLR(fs.torch_optimizer(ADAMW, lr=1e-3), T_max=100),
    "pass lr=fs.torch_schedule(CosineAnnealingLR, lr=..., ...)":
        lambda s: fs.torch_optimizer(ADAMW, lr=schedulers.CosineAnnealingLR(ADAMW(NET.parameters()), T_max=100)),
    "a schedule of torch_schedule has no attribute 'step': leave it out":
        lambda s: fs.torch_schedule(schedulers.CosineAnnealingLR, lr=1e-3, T_max=100).step(),
    "pass the class itself, and its options by name": lambda s: fs.torch_optimizer(functools.partial(ADAMW, lr=1e-3)),
    "an optimizer of torch_optimizer or muon has no attribute 'param_groups'":
        lambda s: fs.torch_optimizer(SGD, lr=0.1).param_groups,
    "an optimizer of torch_optimizer or muon has no attribute 'zero_grad'":
        lambda s: fs.torch_optimizer(SGD, lr=0.1).zero_grad(),
    "an optimizer of torch_optimizer or muon has no attribute 'state_dict'":
        lambda s: fs.torch_optimizer(SGD, lr=0.1).state_dict(),
    "found torch's GradScaler, which keeps its scale to itself":
        lambda s: s.step(scaler=torch.amp.GradScaler("cpu", enabled=False)),
    "a GradScaler has no attribute 'step': make_train_step(..., scaler=) does it":
        lambda s: fs.GradScaler().step(fs.torch_optimizer(SGD, lr=0.1)),
    "is not one of torch_optimizer(SGD): it must hold nothing; found ['exp_avg',":
        lambda s: s.step()(stepped(s, fs.torch_optimizer(ADAMW, lr=1e-3)), s.x),
    "loss_fn must be a function loss_fn(shards, buffers, batch); found Sequential": lambda s: s.step(loss_fn=NET),
    "loss_fn must be a function loss_fn(shards, buffers, batch); found one of (shards, batch)":
        lambda s: s.step(loss_fn=lambda shards, batch: s.loss(shards, batch)),
    "loss_fn must be a function loss_fn(shards, buffers, batch); found TorchOptimizer":
        lambda s: s.step(s.loss_of_step, fs.torch_optimizer(SGD, lr=0.1)),
    "found tuple: write state, metrics = step(state, batch)": lambda s: s.step()(s.step()(s.state(), s.x), s.x),
    "found dict: make the state with step.init(shards, buffers)": lambda s: s.step()(s.shards, s.x),
    "found dict: pass its entry 'train'": lambda s: s.step()({"train": s.state(), "epoch": 3}, s.x),
    "pass one batch as a tensor, or as a tuple or dictionary of tensors":
        lambda s: s.step(accumulate=2)(s.state(), [s.x.numpy()]),
    "a training step has no attribute 'backward'": lambda s: s.step().backward(),
    # State dicts and checkpoints
    "the state dict holds ['9.weight'], which aren't leaves of the plan and were left out":
        lambda s: fs.from_state_dict({**PARAMS, "9.weight": torch.ones(2)}, s.plan, s.mesh),
    "under names that carry the prefix 'module.' that has to be removed":
        lambda s: fs.from_state_dict({f"module.{name}": leaf for name, leaf in PARAMS.items()}, s.plan, s.mesh),
    "its entry 'model' is a state dict that holds them: pass state_dict['model']":
        lambda s: fs.from_state_dict({"model": PARAMS, "epoch": 3}, s.plan, s.mesh),
    "a state dict must be a dictionary {name: tensor}; found str": lambda s: fs.from_state_dict("model.pt", s.plan, s.mesh),
    "a state dict must be a dictionary {name: tensor}; found Sequential": lambda s: fs.from_state_dict(NET, s.plan, s.mesh),
    "path must be a path, as text or a pathlib.Path; found TrainState":
        lambda s: fs.save(s.state(), "step-1", s.plan, s.mesh),
    "save_pretrained takes the apply of a model of Hugging Face; found FullyShard":
        lambda s: fs.save_pretrained("model", s.sharded, s.shards, s.plan, s.mesh),
    'Unexpected key(s) in state_dict: "", "0", "2"': lambda s: copy.deepcopy(NET).load_state_dict(s.shards),
    "which is a file, and save makes a folder": lambda s: fs.restore(__file__, s.plan, s.mesh),
    "Weights only load failed": lambda s: torch.load(saved(s.state())),
    "a function that fully_shard returned cannot be pickled": lambda s: saved(s.sharded),
    "a training step cannot be pickled": lambda s: saved(s.step()),
    "a mesh cannot be pickled": lambda s: saved({"mesh": s.mesh}),
    "this tensor was donated to a training step": lambda s: copy.deepcopy(donated(s)),
    # Ranks and meshes
    "every rank has to call the same functions in the same order, even if one rank alone uses a result":
        lambda s: fs.simulate(lambda mesh: None if mesh.rank else fs.psum(DATA, mesh), world_size=2),
    "found 'cuda': pass the device by keyword, as in init_mesh(device='cuda')": lambda s: fs.init_mesh("cuda"),
    "a mesh has no attribute 'get_rank': this rank's number is mesh.rank": lambda s: s.mesh.get_rank(),
    "device_mesh must be a torch.distributed DeviceMesh; found tuple": lambda s: fs.Mesh.from_device_mesh((2, 4)),
    "the tensor comes before the mesh, as in psum(x, mesh)": lambda s: fs.psum(s.mesh, s.x),
}  # fmt: skip
CASES = [
    ("documented", words, getattr(builtins, kind)(words), PROGRAMS[words]) for kind, words in MESSAGES if words in PROGRAMS
]
