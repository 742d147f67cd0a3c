"""Race on one GPU: a Llama of a billion parameters, against plain eager and FSDP2.

It needs a CUDA device with about 60 GiB of free memory, and ``transformers``.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from benchmarks.peers import OURS, TITLES, sharded_by_fsdp2
from benchmarks.results import Table
from funcshard.testing import delayed

SIZES = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
SMALL_BATCH, LARGE_BATCH = (2, 512), (8, 1024)  # samples, and tokens of each; the host limits the first
WARM = 3
LIMIT = 1e-2  # relative difference of losses that is accepted; bfloat16 rounds at 4e-3
DELAY, STEPS = 2e-4, 3  # seconds of an all-gather, less than a layer computes; steps in the trace
TITLE = "Llama, 1.2 G parameters in bfloat16, 1 GPU"


@dataclass(frozen=True, slots=True)
class Race:
    """A race of peers.

    Attributes:
        peers: the peers; times are divided by those of the first one.
        remat: whether all layers are computed again in backward.
        offload: whether parameters, gradients and the optimizer are on the CPU.
        compiled: whether the layers are compiled; ours as one traced step.
        batch: number of samples, and of tokens in each.
    """

    words: str
    peers: tuple[str, ...] = ("none", "fsdp2", "full_shard")
    dtype: torch.dtype = torch.bfloat16
    remat: bool = False
    offload: bool = False
    compiled: bool = False
    rounds: int = 5
    batch: tuple[int, int] = SMALL_BATCH


RACES: dict[str, Race] = {
    "bfloat16": Race("", ("none", "fsdp2", *OURS), rounds=10),
    "large": Race(", 8 samples of 1,024 tokens", ("none", "fsdp2", *OURS), batch=LARGE_BATCH, rounds=6),
    "float32": Race(", but in float32", dtype=torch.float32),
    "remat": Race(", layers computed again in backward", remat=True),
    "offload": Race(", parameters and optimizer on the CPU", ("fsdp2", "full_shard"), offload=True, rounds=3),
    "compiled": Race(", compiled", compiled=True),
}


# --- tables ---------------------------------------------------------------------------------------


def race_table(name: str) -> Table:
    """Run a race of ``RACES`` on a GPU, and return its table; all peers have to compute the same losses."""
    kind = RACES[name]
    with tempfile.TemporaryDirectory(prefix="race-") as directory:
        dist.init_process_group("nccl", store=dist.FileStore(str(Path(directory) / "store"), 1), rank=0, world_size=1)
        try:
            runners = {peer: _ready(kind, peer) for peer in kind.peers}
            for _ in range(kind.rounds):  # in turns, because the speed of the host varies
                for runner in runners.values():
                    runner.step()
        finally:
            dist.destroy_process_group()
    first = runners[kind.peers[0]]
    rows = []
    for peer, runner in runners.items():
        if any(not abs(a - b) <= LIMIT * abs(b) for a, b in zip(runner.losses, first.losses, strict=True)):
            of = TITLES[kind.peers[0]]
            raise ValueError(f"{TITLES[peer]} does not compute the losses of {of}: {runner.losses}, not {first.losses}")
        wall, host = statistics.median(runner.walls), statistics.median(runner.hosts)
        units = SIZES["num_hidden_layers"] + 1
        times = [f"{1e3 * wall:.1f}", f"{wall / statistics.median(first.walls):.2f}", f"{1e3 * host:.1f}"]
        rows.append([TITLES[peer], *times, f"{1e6 * host / units:.0f}", f"{runner.peak / 2**30:.2f}"])
    header = ["peer", "ms a step", f"÷ {TITLES[kind.peers[0]]}", "host ms a step", "host µs a unit", "peak GiB"]
    return Table(f"{TITLE}{kind.words}: {torch.cuda.get_device_name()}", header, rows)


def overlap_table(file: Path) -> tuple[Table, float]:
    """Trace ``full_shard`` with slow all-gathers; return a table, and the hidden share of the delay."""
    torch.cuda.empty_cache()
    with pretended("cuda", DELAY) as mesh:
        # Why the large batch: where the host limits the step, the device idles under the gathers.
        number, slept, held = held_up(traced(_ours("full_shard", mesh, RACES["large"]), file, "cuda", STEPS))
    hidden = 1 - held / slept if number else 0.0
    per_step = [f"{microseconds / 1e3 / STEPS:.2f}" for microseconds in (slept, held)]
    title = f"Gathers under compute; {TITLE}, rank 0 of 2, whose gathers take {1e3 * DELAY:g} ms and move nothing"
    header = ["strategy", "gathers a step", "ms of delay a step", "of it that holds kernels up", "hidden"]
    return Table(title, header, [["full_shard", f"{number / STEPS:.0f}", *per_step, f"{100 * hidden:.0f} %"]]), hidden


# --- peers ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Runner:
    """A peer that is ready to run.

    Attributes:
        run: takes a step, and returns its loss.
        bytes: memory on the device that it keeps between steps.
        walls, hosts: seconds of its steps, and those until the host had issued them.
    """

    run: Callable[[], torch.Tensor]
    bytes: int
    losses: list[float]
    walls: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)
    peak: int = 0

    def step(self) -> None:
        """Take a step, and measure it."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - self.bytes
        start = time.perf_counter()
        loss = self.run()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        self.walls.append(time.perf_counter() - start)
        self.hosts.append(issued - start)
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)
        self.losses.append(loss.item())


def _ready(kind: Race, peer: str) -> _Runner:
    """Return a peer that has taken its first steps."""
    before = torch.cuda.memory_allocated()
    run = _ours(peer, fs.init_mesh(device="cuda"), kind) if peer in OURS else _theirs(peer, kind)
    losses = [run().item() for _ in range(WARM)]
    return _Runner(run, torch.cuda.memory_allocated() - before, losses)


def _model(dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    finally:
        torch.set_default_dtype(usual)


def _tokens(kind: Race) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], kind.batch, generator=torch.Generator().manual_seed(1)).to("cuda")


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _theirs(peer: str, kind: Race) -> Callable[[], torch.Tensor]:
    model = _model(kind.dtype)
    layer_class = type(model.model.layers[0])
    for layer in model.model.layers:  # as torch's recipes do
        if kind.remat:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if kind.compiled:
            layer.compile()
    if peer == "fsdp2":
        further: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if kind.offload else {}
        model = sharded_by_fsdp2(model, layer_class, mesh=dist.device_mesh.init_device_mesh("cuda", (1,)), **further)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = _tokens(kind)

    def run() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(model(tokens).logits, tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def _ours(strategy: str, mesh: fs.Mesh, kind: Race) -> Callable[[], torch.Tensor]:
    model = _model(kind.dtype)
    units = fs.wrap.by_class(type(model.model.layers[0]))(model)
    apply, params, buffers = fs.make_functional(model)
    del model
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy, offload=kind.offload)
    sharded = fs.fully_shard(apply, plan, mesh, remat=units if kind.remat else ())
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    loss_fn = lambda shards, buffers, tokens: _loss(sharded(shards, buffers, tokens).logits, tokens)  # noqa: E731
    step: Any = fs.make_train_step(loss_fn, optimizer, plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    del params
    tokens = _tokens(kind)
    if kind.compiled:
        step = fs.trace(step, state, tokens).compile()

    def run() -> torch.Tensor:
        nonlocal state
        state, metrics = step(state, tokens)
        return metrics["loss"]

    return run


# --- how much of a slow all-gather overlaps with computation --------------------------------------

# One GPU has no other rank to gather from. So the other rank is torch's "fake" process group, whose
# collectives return at once and move nothing, in the order of real ones. Each all-gather then sleeps
# on a stream of its own (``delayed``), and the trace shows the kernels that ran meanwhile.
SLEEP = "spin_kernel"  # the kernel of torch.cuda._sleep


class Kernel(NamedTuple):
    """A kernel that ran on a GPU, and when the host launched it; in microseconds."""

    start: float
    end: float
    stream: int
    name: str
    launched: float


@contextlib.contextmanager
def pretended(device: str, seconds: float, world_size: int = 2) -> Iterator[fs.Mesh]:
    """Yield the mesh of rank 0 of a pretended world, whose all-gathers take ``seconds``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield delayed(fs.init_mesh(device=device), "all_gather", seconds)
    finally:
        dist.destroy_process_group()


def traced(run: Callable[[], object], file: Path, device: str, steps: int = 3, warm: int = 3) -> list[Kernel]:
    """Run steps under the profiler, write the Chrome trace to ``file``, and return its kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(warm):
        run()
    finish()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            run()
        finish()
    profile.export_chrome_trace(str(file))
    return kernels(json.loads(file.read_text()))


def kernels(trace: dict[str, Any]) -> list[Kernel]:
    """Return the GPU kernels of a Chrome trace."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    # Why by correlation: the profiler gives one number to a launch and to its kernel.
    launches = {
        event["args"]["correlation"]: event["ts"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    found = []
    for event in (event for event in events if event.get("cat") == "kernel"):
        begin, args = event["ts"], event["args"]
        launched = launches.get(args["correlation"], begin)
        found.append(Kernel(begin, begin + event["dur"], args["stream"], event["name"], launched))
    return found


def held_up(found: Iterable[Kernel]) -> tuple[int, float, float]:
    """Return the number of sleeps, their microseconds, and those in which they held other kernels up.

    A sleep holds a kernel up while the device runs no other kernel and the host has launched this
    one. A device that idles because the host has launched nothing is not held up.
    """
    every = sorted(found)
    sleeps = [kernel for kernel in every if SLEEP in kernel.name]
    held, busy_until = 0.0, 0.0
    for kernel in every:
        if SLEEP in kernel.name:
            continue
        idle_from = max(busy_until, kernel.launched)
        held += sum(max(0.0, min(kernel.start, sleep.end) - max(idle_from, sleep.start)) for sleep in sleeps)
        busy_until = max(busy_until, kernel.end)
    return len(sleeps), sum(sleep.end - sleep.start for sleep in sleeps), held
