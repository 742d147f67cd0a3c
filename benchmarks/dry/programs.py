"""Programs that run dry beside steps: conversions, initialisation, combinators, gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

import funcshard as fs
from benchmarks.dry.mode import Wait, dry_cuda, is_dry
from benchmarks.dry.steps import BATCH, WIDTH, Net, batch_of, check_placed, made, train

__all__ = [
    "FORMS", "average", "collectives", "combine", "compose", "convert", "evaluate", "initialise", "measure", "model_axes",
    "per_sample", "simulated", "to_host",
]  # fmt: skip


# Options of optimizer_to_state_dict.
FORMS: tuple[dict[str, Any], ...] = ({}, {"rank0_only": True}, {"sharded": True}, {"flatten": True})


def convert(mesh: fs.Mesh, *, forms: Sequence[Mapping[str, Any]] = FORMS[:1], **options: Any) -> None:
    """Convert parameters and optimizer state to names and back, in every form."""
    run, state = train(mesh, **options)
    plan, optimizer = run.plan, run.optimizer
    for form in FORMS[:3]:
        found = fs.to_state_dict(state.shards, plan, mesh, buffers=state.buffers, **form)
        if not form:
            assert all(value.device == mesh.device for value in found.values()), "full tensors stay on the device"
            fs.from_state_dict({name: found[name] for name in plan.names}, plan, mesh)
    fs.gather(state.shards, plan, mesh)
    for kept in forms:
        found = fs.optimizer_to_state_dict(state.opt_state, optimizer, plan, mesh, **kept)
        if "rank0_only" not in kept:
            opt_state = fs.optimizer_from_state_dict(found, optimizer, plan, mesh)
    run.step(state._replace(opt_state=opt_state), batch_of(mesh))


def to_host(mesh: fs.Mesh) -> None:
    """Convert to a state dict on the CPU, which the caller asks for."""
    run, state = train(mesh)
    found = fs.to_state_dict(state.shards, run.plan, mesh, offload=True)
    assert all(value.device.type == "cpu" for value in found.values()), "offload=True moves to the CPU"


def initialise(mesh: fs.Mesh) -> None:
    """Make shards of a module on the meta device, and of one on the CPU."""
    with torch.device("meta"):
        net = Net()
    apply, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["embed", "blocks.*"])
    shards, buffers = fs.init_module(net, plan, mesh)
    out = fs.fully_shard(apply, plan, mesh)(shards, buffers, batch_of(mesh))
    assert out.device == mesh.device
    on_host = lambda unit: {leaf.path: torch.randn(leaf.whole_shape) for leaf in unit.leaves}  # noqa: E731
    check_placed(fs.init_shards(on_host, plan, mesh), plan, mesh)


def evaluate(mesh: fs.Mesh, **options: Any) -> None:
    """Run forward without gradients, and in inference mode; write to, copy and average the state."""
    run, state = train(mesh, **options)
    with torch.no_grad():
        run.sharded(state.shards, state.buffers, batch_of(mesh))
        for shard in _leaves(state.shards):
            shard.mul_(0.99)
        average = torch.utils._pytree.tree_map(torch.clone, state.shards)
        for unit, shards in state.shards.items():
            for key, shard in shards.items():
                average[unit][key].lerp_(shard, 0.01)
    with torch.inference_mode():
        run.sharded(average, state.buffers, batch_of(mesh))
    run.step(fs.copy(state), batch_of(mesh))


def average(mesh: fs.Mesh, **options: Any) -> None:
    """Keep an average of the shards, in place and by functions of the whole tree, and evaluate it."""
    run, state = train(mesh, **options)
    mean = fs.copy(state.shards)
    check_placed(mean, run.plan, mesh)
    for _ in range(2):
        state, _ = run.step(state, batch_of(mesh))
        pairs = list(zip(_leaves(mean), _leaves(state.shards), strict=True))
        torch._foreach_lerp_([mine for mine, _ in pairs], [new for _, new in pairs], 0.01)
    run.sharded(mean, state.buffers, batch_of(mesh))
    fs.to_state_dict(mean, run.plan, mesh)


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def combine(mesh: fs.Mesh, **options: Any) -> None:
    """Take gradients by hand: with an aux, of micro-batches, of weighted losses, forward over reverse."""
    run = made(mesh, **options)
    shards, buffers, batch = run.state.shards, run.state.buffers, batch_of(mesh)
    loss_fn = lambda s, batch: F.cross_entropy(run.sharded(s, buffers, batch).float(), batch.flatten())  # noqa: E731
    with_aux = lambda s, batch: (loss_fn(s, batch), batch)  # noqa: E731
    _, grads = fs.value_and_grad(with_aux, has_aux=True)(shards, batch)
    fs.global_norm(grads, run.plan, mesh, float("inf"))
    grads, norm = fs.clip_by_global_norm(grads, run.plan, mesh, 1.0)
    assert norm.device == mesh.device, f"the norm is on {norm.device}"
    for reduce in ("each", "once"):
        fs.accumulate(loss_fn, 2, reduce=reduce)(shards, batch)
    if any(unit.offload for unit in run.plan.unit_list):
        return
    gradient = torch.func.grad(loss_fn)
    torch.func.jvp(lambda s: gradient(s, batch), (shards,), (grads,))
    stacked = torch.utils._pytree.tree_map(lambda shard: torch.stack([shard, shard]), shards)
    torch.func.vmap(loss_fn, in_dims=(0, None))(stacked, batch)


class Sliced(nn.Module):
    """Two layers whose hidden values are cut along the axis "tensor"."""

    def __init__(self, mesh: fs.Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.up = nn.Linear(WIDTH, 2 * WIDTH // mesh.shape["tensor"])
        self.down = nn.Linear(2 * WIDTH // mesh.shape["tensor"], WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fs.psum(self.down(torch.tanh(self.up(x))), self.mesh, axis="tensor")


def model_axes(mesh: fs.Mesh) -> None:
    """Train leaves that are slices along a model axis, and convert them."""
    with torch.device(mesh.device):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sliced(mesh))
    apply, params, buffers = fs.make_functional(net)
    local = {"1.up.weight": {"tensor": 0}, "1.up.bias": {"tensor": 0}, "1.down.weight": {"tensor": 1}}
    plan = fs.make_plan(params, mesh, units=["1"], local=local)
    sharded = fs.fully_shard(apply, plan, mesh)
    loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-2)
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, max_norm=1.0)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    state, _ = step(state, torch.zeros(BATCH, WIDTH, device=mesh.device))
    found = fs.to_state_dict(state.shards, plan, mesh, sharded=True)
    fs.from_state_dict(found, plan, mesh)
    fs.gather(state.shards, plan, mesh)


def measure(mesh: fs.Mesh) -> None:
    """Predict and record the events of a step, profile the model, and compare the memory of its plan."""
    run, state = train(mesh)
    with fs.record_events() as events:
        run.step(state, batch_of(mesh))
    assert events, "a step communicates"
    with torch.device(mesh.device):
        apply, params, buffers = fs.make_functional(Net())
    profile = fs.profile(apply, params, buffers, batch_of(mesh))
    fs.estimate(profile, run.plan, optimizer="adamw_single")


def compose(mesh: fs.Mesh) -> None:
    """Compose unshard, reshard and remat by hand, and differentiate with torch's own backward."""
    params = {"w": torch.zeros(WIDTH, WIDTH, device=mesh.device, requires_grad=True)}
    plan = fs.make_plan(params, mesh)
    shards = {key: shard.detach().requires_grad_() for key, shard in fs.shard(params, plan, mesh)[""].items()}
    x = torch.zeros(BATCH, WIDTH, device=mesh.device)
    unit = fs.unshard(lambda leaves, x: torch.tanh(x @ leaves["w"]), plan.units[""], mesh)
    for f in (unit, fs.reshard(unit), fs.remat(unit)):
        with fs.record_events() as events:
            f(shards, x).sum().backward()
        assert all(shard.grad is not None and shard.grad.device == mesh.device for shard in shards.values())
        kinds = [event.kind for event in events]
        assert mesh.world_size == 1 or "reduce_scatter" in kinds, f"backward's collectives are not recorded; found {kinds}"
    torch.func.grad(lambda s: unit(s, x).sum())({key: shard.detach() for key, shard in shards.items()})


def simulated(mesh: fs.Mesh) -> None:
    """Do the same as two simulated ranks, which share autograd's thread for the device."""
    if not is_dry():
        fs.simulate(compose, 2, device=mesh.device)
        return
    fake = FakeTensorMode()

    def main(mesh: fs.Mesh) -> list[Wait]:
        with dry_cuda(fake=fake) as mode:
            compose(mesh)
        return mode.forbidden

    with _disable_current_modes():
        assert fs.simulate(main, 2, device=mesh.device) == [[], []]


def collectives(mesh: fs.Mesh) -> None:
    """Run the collectives of the user."""
    x = torch.zeros(mesh.world_size, 2, device=mesh.device)
    for found in (fs.psum(x, mesh), fs.pmean(x, mesh), fs.pmax(x, mesh), fs.all_gather(x, mesh), fs.psum_scatter(x, mesh)):
        assert found.device == mesh.device
    fs.all_to_all(x, mesh)
    fs.ppermute(x, mesh, [(0, 1), (1, 0)] if mesh.world_size > 1 else [])


def per_sample(mesh: fs.Mesh) -> None:
    """Take private gradients of each sample."""
    with torch.device(mesh.device):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["0"])
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    loss_fn = lambda shards, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
    fs.per_sample_grad(loss_fn, plan, mesh, max_norm=1.0, noise_multiplier=0.0)(
        shards, torch.zeros(BATCH, WIDTH, device=mesh.device)
    )
