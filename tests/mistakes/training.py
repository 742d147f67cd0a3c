"""Mistakes with optimizers, training steps, checkpoints and ranks."""

import copy
import functools
import io

import torch
from torch.optim import lr_scheduler as schedulers

import funcshard as fs
from tests.mistakes.table import mistake
from tests.misuse import BUFFERS, DATA, NET, PARAMS

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW

# --- optimizers and steps -------------------------------------------------------------------------

OPTIMIZERS = "Optimizers and training steps"

mistake(
    OPTIMIZERS, TypeError, "optimizer can only optimize Tensors, but one of the params is str",
    "`torch.optim.AdamW(shards, lr=1e-3)` is an optimizer that changes tensors by itself.",
    "Call `fs.torch_optimizer(torch.optim.AdamW, lr=1e-3)`, and give the shards to `step.init`.",
    lambda s: ADAMW(s.shards, lr=1e-3),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "torch_optimizer() takes 1 positional argument but 2 were given",
    "`fs.torch_optimizer(torch.optim.AdamW, shards, lr=1e-3)` got the shards.",
    "Leave them out, and give them to `step.init(shards, buffers)`, or to `optimizer.init(shards)`.",
    lambda s: fs.torch_optimizer(ADAMW, s.shards, lr=1e-3),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "takes a class of torch.optim and its options; found 'adamw'",
    "`fs.torch_optimizer('adamw', lr=1e-3)` got the name of a class.",
    "Pass the class, `torch.optim.AdamW`.",
    lambda s: fs.torch_optimizer("adamw", lr=1e-3),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "missing 3 required positional arguments: 'grads', 'state', and 'params'",
    "`optimizer.step()` is a habit from torch; the function changes nothing behind your back.",
    "Let `make_train_step` call it, or write `params, state = optimizer.step(grads, state, params)`.",
    lambda s: fs.torch_optimizer(SGD, lr=0.1).step(),
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
    OPTIMIZERS, AttributeError, "a schedule of torch_schedule has no attribute 'step': leave it out",
    "`scheduler.step()` is a habit from torch; a schedule is a function of the step.",
    "Leave it out, and read `metrics['lr']` in place of `scheduler.get_last_lr()`.",
    lambda s: fs.torch_schedule(schedulers.CosineAnnealingLR, lr=1e-3, T_max=100).step(),
)  # fmt: skip
mistake(
    OPTIMIZERS, ValueError, "pass the class itself, and its options by name",
    "`fs.torch_optimizer(functools.partial(torch.optim.AdamW, lr=1e-3))` is a habit of configuration files.",
    "Write `fs.torch_optimizer(torch.optim.AdamW, lr=1e-3)`.",
    lambda s: fs.torch_optimizer(functools.partial(ADAMW, lr=1e-3)),
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
    OPTIMIZERS, AttributeError, "a GradScaler has no attribute 'step': make_train_step(..., scaler=) does it",
    "`scaler.step(optimizer)` is a habit from torch.",
    "Pass `scaler=fs.GradScaler()` to `make_train_step`.",
    lambda s: fs.GradScaler().step(fs.torch_optimizer(SGD, lr=0.1)),
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
    OPTIMIZERS, TypeError, "loss_fn must be a function loss_fn(shards, buffers, batch); found TorchOptimizer",
    "`fs.make_train_step(optimizer, loss_fn, plan, mesh)` has its arguments in the wrong order.",
    "The loss function comes first: `fs.make_train_step(loss_fn, optimizer, plan, mesh)`.",
    lambda s: s.step(s.loss_of_step, fs.torch_optimizer(SGD, lr=0.1)),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "found tuple: write state, metrics = step(state, batch)",
    "`state = step(state, batch)` keeps the pair that a step returns, and the next step takes a state.",
    "Write `state, metrics = step(state, batch)`.",
    lambda s: s.step()(s.step()(s.step().init(s.shards, BUFFERS), s.x), s.x),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "found dict: make the state with step.init(shards, buffers)",
    "`step(shards, batch)` got the shards.",
    "Call `state = step.init(shards, buffers)` once before the loop.",
    lambda s: s.step()(s.shards, s.x),
)  # fmt: skip
mistake(
    OPTIMIZERS, TypeError, "found dict: pass its entry 'train'",
    "`fs.restore` returned a dictionary, as it was saved, and the step takes the state in it.",
    "Write `saved = fs.restore(...)`, and pass `saved['train']`.",
    lambda s: s.step()({"train": s.step().init(s.shards, BUFFERS), "epoch": 3}, s.x),
)  # fmt: skip
mistake(
    OPTIMIZERS, ValueError, "pass one batch as a tensor, or as a tuple or dictionary of tensors",
    "`step(state, loader)` got the whole DataLoader, or `accumulate=` cannot split an array or an object.",
    "Write `for batch in loader: state, metrics = step(state, batch)`, with tensors in `batch`.",
    lambda s: s.step(accumulate=2)(s.step().init(s.shards, BUFFERS), [s.x.numpy()]),
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
    STATE, TypeError, "path must be a path, as text or a pathlib.Path; found TrainState",
    "`fs.save(state, path, plan, mesh)` has the order of `torch.save`.",
    "The path comes first: `fs.save(path, state, plan, mesh)`.",
    lambda s: fs.save(s.step().init(s.shards, BUFFERS), "step-1", s.plan, s.mesh),
)  # fmt: skip
mistake(
    STATE, TypeError, "save_pretrained takes the apply of a model of Hugging Face; found FullyShard",
    "`fs.save_pretrained(folder, sharded, ...)` got the function of shards.",
    "Pass the `apply` that `fs.from_pretrained` or `fs.make_functional` returned.",
    lambda s: fs.save_pretrained("model", s.sharded, s.shards, s.plan, s.mesh),
)  # fmt: skip
mistake(
    STATE, RuntimeError, 'Unexpected key(s) in state_dict: "", "0", "2"',
    "`net.load_state_dict(shards)` got the parts of one rank, under the names of units.",
    "Call `net.load_state_dict(fs.to_state_dict(shards, plan, mesh))`, `to_state_dict` on every rank.",
    lambda s: copy.deepcopy(NET).load_state_dict(s.shards),
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


# --- ranks ----------------------------------------------------------------------------------------

RANKS = "Ranks and meshes"

mistake(
    RANKS, RuntimeError, "every rank has to call the same functions in the same order, even if one rank alone uses a result",
    "`if mesh.rank == 0: fs.to_state_dict(...)`: the ranks have to exchange data, and one rank alone calls.",
    "Call it on every rank, and write the result on rank 0 alone. See [debugging a hang](hanging.md).",
    lambda s: fs.simulate(lambda mesh: None if mesh.rank else fs.psum(DATA, mesh), world_size=2),
)  # fmt: skip
mistake(
    RANKS, TypeError, "found 'cuda': pass the device by keyword, as in init_mesh(device='cuda')",
    "`fs.init_mesh('cuda')` is like `init_device_mesh('cuda', (8,))`.",
    "Call `fs.init_mesh()`, which takes CUDA if there is a GPU, or `fs.init_mesh(device='cuda')`.",
    lambda s: fs.init_mesh("cuda"),
)  # fmt: skip
mistake(
    RANKS, AttributeError, "a mesh has no attribute 'get_rank': this rank's number is mesh.rank",
    "`mesh.get_rank()`, `mesh.size()` and `mesh.get_local_rank()` are methods of torch's DeviceMesh.",
    "Use `mesh.rank`, `mesh.world_size` and `mesh.position['shard']`.",
    lambda s: s.mesh.get_rank(),
)  # fmt: skip
mistake(
    RANKS, TypeError, "device_mesh must be a torch.distributed DeviceMesh; found tuple",
    "`fs.Mesh.from_device_mesh((2, 4))` got a shape.",
    "Call `fs.init_mesh({'replicate': 2, 'shard': 4})`.",
    lambda s: fs.Mesh.from_device_mesh((2, 4)),
)  # fmt: skip
mistake(
    RANKS, TypeError, "the tensor comes before the mesh, as in psum(x, mesh)",
    "`fs.psum(mesh, x)` has its arguments in the wrong order.",
    "Write `fs.psum(x, mesh)`.",
    lambda s: fs.psum(s.mesh, s.x),
)  # fmt: skip
