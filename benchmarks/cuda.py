"""Race on one GPU: a Llama of a billion parameters in bfloat16, against plain eager and FSDP2.

A second table shows how much of its all-gathers overlaps with computation. Both need a CUDA device
with about 60 GiB of free memory, and ``transformers``; on other machines the tables say that
nothing was measured.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from benchmarks.dry.device import prepare
from benchmarks.dry.mode import dry_cuda
from benchmarks.peers import OURS, TITLES, sharded_by_fsdp2
from benchmarks.storages import Storages
from benchmarks.trace import held_up, pretended, traced

__all__ = ["RACES", "TITLES", "Race", "dry_table", "overlap_table", "race_table", "tables"]

SIZES = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
SMALL_BATCH, LARGE_BATCH = (2, 512), (8, 1024)  # samples, and tokens of each; the host limits the first
ROUNDS, WARM = 10, 3
LIMIT = 1e-2  # relative difference of losses that is accepted; bfloat16 rounds at 4e-3
HEADER = ["peer", "ms a step", "÷ plain eager", "host ms a step", "host µs a unit", "peak GiB"]
PEERS = ("none", "fsdp2", *OURS)
DELAY, STEPS = 2e-4, 3  # seconds of an all-gather, less than a layer computes; steps in the trace
TITLE = "Llama, 1.2 G parameters in bfloat16, 1 GPU"
DELAYED = f"Gathers under compute; {TITLE}, rank 0 of 2, whose gathers take {1e3 * DELAY:g} ms and move nothing"
TRACED = ["strategy", "gathers a step", "ms of delay a step", "of it that holds kernels up", "hidden"]


@dataclass(frozen=True, slots=True)
class Race:
    """A race of peers.

    Attributes:
        words: words that follow in its title.
        peers: the peers; times are divided by those of the first one.
        dtype: the dtype of parameters and computation.
        remat: whether all layers are computed again in backward.
        offload: whether parameters, gradients and the optimizer are on the CPU.
        compiled: whether the layers are compiled; ours as one traced step.
        rounds: number of steps that are measured.
        batch: number of samples, and of tokens in each.
    """

    words: str
    peers: tuple[str, ...]
    dtype: torch.dtype = torch.bfloat16
    remat: bool = False
    offload: bool = False
    compiled: bool = False
    rounds: int = ROUNDS
    batch: tuple[int, int] = SMALL_BATCH


RACES: dict[str, Race] = {
    "bfloat16": Race("", PEERS),
    "large": Race(", 8 samples of 1,024 tokens", PEERS, batch=LARGE_BATCH, rounds=6),
    "float32": Race(", but in float32", ("none", "fsdp2", "full_shard"), dtype=torch.float32, rounds=5),
    "remat": Race(", layers computed again in backward", ("none", "fsdp2", "full_shard"), remat=True, rounds=5),
    "offload": Race(", parameters and optimizer on the CPU", ("fsdp2", "full_shard"), offload=True, rounds=3),
    "compiled": Race(", compiled", ("none", "fsdp2", "full_shard"), compiled=True, rounds=5),
}


def missing() -> str:
    """Return the reason why this machine cannot measure, or ``""`` if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return ""


def tables(sizes: dict[str, Any] | None = None, file: Path | None = None) -> list[dict[str, Any]]:
    """Measure and return the tables; if the machine lacks something, their rows name it.

    Arguments:
        sizes: sizes of the Llama; the default has 1.2 billion parameters.
        file: file for a Chrome trace of ``full_shard`` with slow all-gathers; without it nothing is
            traced.
    """
    title = TITLE
    lacking = missing()
    if lacking:
        no = f"not measured: {lacking}"
        found = [{"title": title, "header": ["peer", "result"], "rows": [[TITLES[peer], no] for peer in PEERS]}]
        traces = [{"title": DELAYED, "header": ["strategy", "result"], "rows": [["full_shard", no]]}]
        return found + (traces if file else [])
    found = _raced(title, sizes or SIZES, RACES["bfloat16"])
    return found if file is None else [*found, overlap_table(file, sizes)]


def overlap_table(file: Path, sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Trace ``full_shard`` with slow all-gathers, and return the table; see ``tables``."""
    return {"title": DELAYED, "header": TRACED, "rows": [_overlap(sizes or SIZES, file)]}


def dry_table(name: str = "bfloat16", sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run two steps of each peer but FSDP2 on fake CUDA tensors; return waits and memory as a table.

    FSDP2 needs CUDA's streams. Attention computes by torch's fallback, in all peers, and nothing is
    compiled.
    """
    # Why here: its modules name `torch.cuda.Stream` in annotations, and a dry run replaces that class.
    importlib.import_module("transformers.models.llama.modeling_llama")
    prepare()
    kind = replace(RACES[name], compiled=False)
    rows = []
    for peer in (peer for peer in kind.peers if peer != "fsdp2"):
        with dry_cuda() as mode, Storages() as storages:
            run = _made(kind, sizes or SIZES, peer, fs.Mesh(device=torch.device("cuda", 0)))
            del mode.waits[:]
            for _ in range(2):
                storages.reset()
                run()
        waits = [f"{wait.what} in {wait.site}" for wait in mode.forbidden]
        peak = storages.peak("cuda").bytes / 2**30
        rows.append([TITLES[peer], ", ".join(dict.fromkeys(waits)) or "none", f"{peak:.2f}"])
        del run
    header = ["peer", "waits of the host in a step", "peak GiB"]
    return {"title": f"{TITLE}{kind.words}, dry", "header": header, "rows": rows}


def _overlap(sizes: dict[str, Any], file: Path) -> list[str]:
    torch.cuda.empty_cache()
    with pretended("cuda", DELAY) as mesh:
        # Why the large batch: where the host limits the step, the device idles under the gathers.
        found = traced(_ours(sizes, "full_shard", mesh, RACES["large"]), file, "cuda", STEPS)
    return overlap_row("full_shard", held_up(found), STEPS)


def overlap_row(strategy: str, found: tuple[int, float, float], steps: int) -> list[str]:
    """Return the table row for the result of ``held_up`` over ``steps`` steps."""
    number, slept, held = found
    if not number:
        return [strategy, "0", *["not measured: the trace has no gather"] * 3]
    per_step = [f"{microseconds / 1e3 / steps:.2f}" for microseconds in (slept, held)]
    return [strategy, f"{number / steps:.0f}", *per_step, f"{100 * (1 - held / slept):.0f} %"]


def race_table(name: str, sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a race of ``RACES`` on a GPU, and return its table.

    Raises:
        ValueError: a peer computes other losses than the first one.
    """
    return _raced(TITLE, sizes or SIZES, RACES[name])[0]


def _raced(title: str, sizes: dict[str, Any], kind: Race) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="race-") as directory:
        dist.init_process_group("nccl", store=dist.FileStore(str(Path(directory) / "store"), 1), rank=0, world_size=1)
        try:
            rows = _rows(kind, sizes)
            header = [*HEADER[:2], f"÷ {TITLES[kind.peers[0]]}" if kind.peers[0] != "none" else HEADER[2], *HEADER[3:]]
            return [{"title": f"{title}{kind.words}: {torch.cuda.get_device_name()}", "header": header, "rows": rows}]
        finally:
            dist.destroy_process_group()


@dataclass(slots=True, eq=False)
class _Runner:
    """A peer that is ready to run.

    Attributes:
        run: takes a step, and returns its loss.
        bytes: memory on the device that it keeps between steps.
        walls, hosts: seconds of its steps, and those until the host had issued them.
        losses: the losses of all steps.
        peak: bytes on the device at the peak of a step.
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


def _ready(kind: Race, sizes: dict[str, Any], peer: str) -> _Runner:
    """Return a peer that has taken its first steps."""
    before = torch.cuda.memory_allocated()
    run = _made(kind, sizes, peer)
    losses = [run().item() for _ in range(WARM)]
    return _Runner(run, torch.cuda.memory_allocated() - before, losses)


def _rows(kind: Race, sizes: dict[str, Any]) -> list[list[str]]:
    runners = {peer: _ready(kind, sizes, peer) for peer in kind.peers}
    for _ in range(kind.rounds):  # in turns, because the speed of the host varies
        for runner in runners.values():
            runner.step()
    rows: list[list[str]] = []
    first = runners[kind.peers[0]]
    for peer, runner in runners.items():
        if any(not abs(a - b) <= LIMIT * abs(b) for a, b in zip(runner.losses, first.losses, strict=True)):
            of = TITLES[kind.peers[0]]
            raise ValueError(f"{TITLES[peer]} does not compute the losses of {of}: {runner.losses}, not {first.losses}")
        wall, host = statistics.median(runner.walls), statistics.median(runner.hosts)
        ratio = wall / statistics.median(first.walls)
        milliseconds = [TITLES[peer], f"{1e3 * wall:.1f}", f"{ratio:.2f}", f"{1e3 * host:.1f}"]
        units = sizes["num_hidden_layers"] + 1
        rows.append([*milliseconds, f"{1e6 * host / units:.0f}", f"{runner.peak / 2**30:.2f}"])
    return rows


def _made(kind: Race, sizes: dict[str, Any], peer: str, mesh: fs.Mesh | None = None) -> Callable[[], torch.Tensor]:
    if peer in OURS:
        return _ours(sizes, peer, mesh or fs.init_mesh(device="cuda"), kind)
    return (_fsdp2 if peer == "fsdp2" else _eager)(sizes, kind)


def _model(sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(LlamaConfig(**sizes)).train()
    finally:
        torch.set_default_dtype(usual)


def _tokens(sizes: dict[str, Any], kind: Race) -> torch.Tensor:
    return torch.randint(sizes["vocab_size"], kind.batch, generator=torch.Generator().manual_seed(1)).to("cuda")


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _plain(model: Any, sizes: dict[str, Any], kind: Race) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = _tokens(sizes, kind)

    def run() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(model(tokens).logits, tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def _eager(sizes: dict[str, Any], kind: Race) -> Callable[[], torch.Tensor]:
    model = _model(sizes, kind.dtype)
    _change_layers(model, kind)
    return _plain(model, sizes, kind)


def _fsdp2(sizes: dict[str, Any], kind: Race) -> Callable[[], torch.Tensor]:
    model = _model(sizes, kind.dtype)
    layer = type(model.model.layers[0])
    _change_layers(model, kind)
    mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
    further: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if kind.offload else {}
    return _plain(sharded_by_fsdp2(model, layer, mesh=mesh, **further), sizes, kind)


def _change_layers(model: Any, kind: Race) -> None:
    """Let each layer be computed again in backward, or be compiled, as torch's recipes do."""
    for layer in model.model.layers:
        if kind.remat:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if kind.compiled:
            layer.compile()


def _ours(sizes: dict[str, Any], strategy: str, mesh: fs.Mesh, kind: Race) -> Callable[[], torch.Tensor]:
    model = _model(sizes, kind.dtype)
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
    tokens = _tokens(sizes, kind)
    if kind.compiled:
        step = fs.trace(step, state, tokens).compile()

    def run() -> torch.Tensor:
        nonlocal state
        state, metrics = step(state, tokens)
        loss: torch.Tensor = metrics["loss"]
        return loss

    return run
