"""Programs that run dry beside steps: conversions, initialisation, gradients, files, graphs."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

import funcshard as fs
from benchmarks.dry.mode import DryCuda, Wait, current_mode, dry_cuda, is_dry
from benchmarks.dry.steps import BATCH, WIDTH, Made, Net, batch_of, check_placed, check_state, made, train
from benchmarks.dry.stream_order import StreamOrder
from funcshard.checkpoint import safetensors
from funcshard.checkpoint.writer import Writer

# Options of optimizer_to_state_dict.
FORMS: tuple[dict[str, Any], ...] = ({}, {"rank0_only": True}, {"sharded": True})


def convert(mesh: fs.Mesh, *, forms: Sequence[Mapping[str, Any]] = FORMS[:1], **options: Any) -> None:
    """Convert parameters and optimizer state to names and back, in every form."""
    run, state = train(mesh, **options)
    plan, optimizer = run.plan, run.optimizer
    for form in (*FORMS, {"offload": True}):
        found = fs.to_state_dict(state.shards, plan, mesh, buffers=state.buffers, **form)
        if not form:
            assert all(value.device == mesh.device for value in found.values()), "full tensors stay on the device"
            fs.from_state_dict({name: found[name] for name in plan.names}, plan, mesh)
    assert all(value.device.type == "cpu" for value in found.values()), "offload=True moves to the CPU"
    fs.gather(state.shards, plan, mesh)
    for kept in forms:
        found = fs.optimizer_to_state_dict(state.opt_state, optimizer, plan, mesh, **kept)
        if "rank0_only" not in kept:
            opt_state = fs.optimizer_from_state_dict(found, optimizer, plan, mesh)
    run.step(state._replace(opt_state=opt_state), batch_of(mesh))


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
        for unit in state.shards.values():
            for shard in unit.values():
                shard.mul_(0.99)
        average = tree_map(torch.clone, state.shards)
        for unit, shards in state.shards.items():
            for key, shard in shards.items():
                average[unit][key].lerp_(shard, 0.01)
    with torch.inference_mode():
        run.sharded(average, state.buffers, batch_of(mesh))
    run.step(fs.copy(state), batch_of(mesh))


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
    stacked = tree_map(lambda shard: torch.stack([shard, shard]), shards)
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
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=1e-2), plan, mesh, max_norm=1.0)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    state, _ = step(state, torch.zeros(BATCH, WIDTH, device=mesh.device))
    fs.from_state_dict(fs.to_state_dict(state.shards, plan, mesh, sharded=True), plan, mesh)
    fs.gather(state.shards, plan, mesh)


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
        with dry_cuda(fake) as mode:
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
    evaluate = fs.per_sample_grad(loss_fn, plan, mesh, max_norm=1.0, noise_multiplier=0.0)
    evaluate(shards, torch.zeros(BATCH, WIDTH, device=mesh.device))


# --- files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def written_as_zeros() -> Iterator[None]:
    """Let checkpoints be saved without data, by threads that run dry and end when they have started.

    It does nothing if this thread does not run dry.
    """
    if not is_dry():
        yield
        return
    modes, run, start = _get_current_dispatch_mode_stack(), Writer.run, Writer.start

    def inside(thread: Writer) -> None:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
                if isinstance(mode, StreamOrder):
                    stack.enter_context(mode.new_thread())
            run(thread)

    def to_the_end(thread: Writer) -> None:
        start(thread)
        thread.join()

    threads = unittest.mock.patch.multiple(Writer, run=inside, start=to_the_end)
    # Why zero: a broadcast moves no values, so it leaves the token of a save a zero.
    token = unittest.mock.patch.object(secrets, "randbits", return_value=0)
    # In place of a tensor that lies in a buffer, which keeps its zeros.
    zeros = lambda buffer, *, dtype: torch.zeros(len(buffer), dtype=dtype)  # noqa: E731
    written = unittest.mock.patch("funcshard.checkpoint.rank_files.byte_memory", lambda tensor: bytes(tensor.nbytes))
    with threads, token, written, unittest.mock.patch("torch.frombuffer", zeros):
        yield


def save_and_restore(mesh: fs.Mesh, **options: Any) -> None:
    """Save a training state, at once and while training goes on; restore it, also under another plan, and train on.

    All of it runs on a stream other than the default one, which is that of the threads that save.
    """
    with _another_stream(mesh), tempfile.TemporaryDirectory(prefix="dry-") as folder, written_as_zeros():
        run, state = train(mesh, **options)
        kept = {"train": state, "ema": fs.copy(state.shards), "own": fs.PerRank(batch_of(mesh)), "epoch": 3}
        fs.save(f"{folder}/1", kept, run.plan, mesh)
        saving = fs.save(f"{folder}/2", kept, run.plan, mesh, wait=False, keep=1)
        run.step(state, batch_of(mesh))
        saving.wait()
        found = fs.latest(folder)
        assert found is not None, "no checkpoint is complete"
        str(fs.restore(found))
        back = fs.restore(found, run.plan, mesh)
        state, metrics = run.step(back["train"], batch_of(mesh))
        check_state(run, state, metrics)
        assert back["own"].value.device == mesh.device, "the batch left the device"


def cut_again(mesh: fs.Mesh, **options: Any) -> None:
    """Restore a training state under a plan with other units and offload, and cut the states of ranks again."""
    run, state = train(mesh, **options)
    other = fs.make_plan(fs.gather(state.shards, run.plan, mesh), mesh, units={"embed": {"offload": True}})
    with tempfile.TemporaryDirectory(prefix="dry-") as folder, written_as_zeros():
        fs.save(f"{folder}/1", state, run.plan, mesh)
        check_placed(fs.restore(f"{folder}/1", other, mesh).shards, other, mesh)
    (found,) = fs.replan([state], run.plan, other)
    check_placed(found.shards, other, mesh)


def _another_stream(mesh: fs.Mesh) -> Any:
    if is_dry():
        return current_mode(StreamOrder).stream("side")
    return torch.cuda.stream(torch.cuda.Stream()) if mesh.device.type == "cuda" else contextlib.nullcontext()


def as_safetensors(mesh: fs.Mesh, **options: Any) -> None:
    """Export parameters, and import a file as Hugging Face writes it."""
    run, state = train(mesh, **options)
    really_open = safetensors._open

    def write(file: Any, entries: Any, tensors: Any) -> None:
        for entry, tensor in zip(entries, tensors, strict=False):  # which has those of other files too
            assert tensor.detach().cpu().nbytes == entry.nbytes, f"{entry.name} has {tensor.numel()} elements"

    def open_without_data(file: Path) -> dict[str, torch.Tensor]:
        with _disable_current_modes():
            found = really_open(file)
        return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in found.items()}

    def replaced(name: str, function: Any) -> Any:
        return unittest.mock.patch.object(safetensors, name, function) if is_dry() else contextlib.nullcontext()

    with tempfile.TemporaryDirectory(prefix="dry-") as folder:
        with replaced("_write_one", write):
            fs.export_safetensors(folder, state.shards, run.plan, mesh, max_shard_size=500)
        with _disable_current_modes():  # a file with values
            alone, params = fs.Mesh(), fs.make_functional(Net())[1]
            plan = fs.make_plan(params, alone)
            fs.export_safetensors(folder, fs.shard(params, plan, alone), plan, alone)
        with replaced("_open", open_without_data):
            check_placed(fs.import_safetensors(folder, run.plan, mesh), run.plan, mesh)


# --- graphs ---------------------------------------------------------------------------------------

_PASSES: dict[str, dict[str, Any]] = {
    "keep_gathered": {"budget": "1MB"},
    "gather_earlier": {"by": 1},
    "wait_later": {},
    "update_early": {},
}


def trace(mesh: fs.Mesh, change: Callable[[Made, Any], Any] | None = None, **options: Any) -> None:
    """Record a step, and compare three steps with those of the recording, or of what ``change`` makes of it."""
    run = made(mesh, **options)
    traced = fs.trace(run.step, run.state, batch_of(mesh))
    losses, waits = _three_steps(run, run.step)
    found, waits_of_graph = _three_steps(run, traced if change is None else change(run, traced))
    if not is_dry():
        torch.testing.assert_close(found, losses)
    assert waits_of_graph <= waits + 1 or change, f"the host waits {waits_of_graph} times in the graph, {waits} in the step"


def _three_steps(run: Made, step: Any) -> tuple[list[torch.Tensor], int]:
    """Return the losses, and how often the host waits in the last step, if it runs dry."""
    torch.manual_seed(7)
    state, losses, counts = fs.copy(run.state), [], []
    for _ in range(3):
        state, metrics = step(state, batch_of(run.mesh))
        losses.append(metrics["loss"])
        counts.append(len(current_mode(DryCuda).waits) if is_dry() else 0)
    check_state(run, state, metrics)
    return losses, counts[2] - counts[1]


def passes(run: Made, traced: Any) -> Any:
    """Return the graph after all passes."""
    for name, options in _PASSES.items():
        traced = getattr(fs.passes, name)(traced, **options)
        traced.memory(), traced.cost(), str(traced)
    return traced


def compiled(run: Made, traced: Any) -> Any:
    """Return the graph, compiled without code for a device."""
    return traced.compile(backend="eager")


def loaded(run: Made, traced: Any) -> Any:
    """Return the graph after it was saved and loaded."""
    file = Path(tempfile.gettempdir()) / f"dry-{os.getpid()}.graph"  # the same on all simulated ranks
    with _disable_current_modes():  # the constants of a graph are no fake tensors
        traced.save(file)
        back = fs.load_traced(file, run.mesh, step=run.step)
    file.unlink(missing_ok=True)
    return back
