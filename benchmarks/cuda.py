"""Race on one GPU: a Llama of a billion parameters in bfloat16, against plain eager and FSDP2.

A second table shows how much of its all-gathers overlaps with computation. Both need a CUDA device
with about 20 GiB of free memory, and ``transformers``; on other machines the tables say that
nothing was measured.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import funcshard as fs
from benchmarks.dry.device import prepare
from benchmarks.dry.mode import dry_cuda
from benchmarks.peers import OURS, TITLES, sharded_by_fsdp2
from benchmarks.storages import Storages
from benchmarks.trace import pretended, traced, under_compute

__all__ = ["TITLES", "dry_table", "overlap_table", "tables"]

SIZES = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
BATCH, LENGTH, ROUNDS, WARM = 2, 512, 10, 3
LIMIT = 1e-2  # relative difference of losses that is accepted; bfloat16 rounds at 4e-3
HEADER = ["peer", "ms a step", "÷ plain eager", "host ms a step", "host µs a unit", "peak GiB"]
PEERS = ("none", "fsdp2", *OURS)
DELAY, STEPS = 2e-4, 3  # seconds of an all-gather, less than a layer computes; steps in the trace
TITLE = "Llama, 1.2 G parameters in bfloat16, 1 GPU"
DELAYED = f"Gathers under compute; {TITLE}, rank 0 of 2, whose gathers take {1e3 * DELAY:g} ms and move nothing"
TRACED = ["strategy", "gathers a step", "ms of delay a step", "of it under compute", "share"]


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
    found = _raced(title, sizes or SIZES)
    return found if file is None else [*found, overlap_table(file, sizes)]


def overlap_table(file: Path, sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Trace ``full_shard`` with slow all-gathers, and return the table; see ``tables``."""
    return {"title": DELAYED, "header": TRACED, "rows": [_overlap(sizes or SIZES, file)]}


def dry_table(sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run two steps of each peer but FSDP2 on fake CUDA tensors; return waits and memory as a table.

    FSDP2 needs CUDA's streams. Attention computes by torch's fallback, in all peers.
    """
    prepare()
    rows = []
    for peer in ("none", *OURS):
        with dry_cuda() as mode, Storages() as storages:
            one = fs.Mesh(device=torch.device("cuda", 0))
            run = _eager(sizes or SIZES) if peer == "none" else _ours(sizes or SIZES, peer, one)
            del mode.waits[:]
            for _ in range(2):
                storages.reset()
                run()
        waits = [f"{wait.what} in {wait.site}" for wait in mode.forbidden]
        peak = storages.peak("cuda").bytes / 2**30
        rows.append([TITLES[peer], ", ".join(dict.fromkeys(waits)) or "none", f"{peak:.2f}"])
        del run
    return {"title": f"{TITLE}, dry", "header": ["peer", "waits of the host in a step", "peak GiB"], "rows": rows}


def _overlap(sizes: dict[str, Any], file: Path) -> list[str]:
    torch.cuda.empty_cache()
    with pretended("cuda", DELAY) as mesh:
        found = traced(_ours(sizes, "full_shard", mesh), file, "cuda", STEPS)
    return overlap_row("full_shard", under_compute(found), STEPS)


def overlap_row(strategy: str, found: tuple[int, float, float], steps: int) -> list[str]:
    """Return the table row for the result of ``under_compute`` over ``steps`` steps."""
    number, slept, covered = found
    if not number:
        return [strategy, "0", *["not measured: the trace has no gather"] * 3]
    per_step = [f"{microseconds / 1e3 / steps:.2f}" for microseconds in (slept, covered)]
    return [strategy, f"{number / steps:.0f}", *per_step, f"{100 * covered / slept:.0f} %"]


def _raced(title: str, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="race-") as directory:
        dist.init_process_group("nccl", store=dist.FileStore(str(Path(directory) / "store"), 1), rank=0, world_size=1)
        try:
            return [{"title": f"{title}: {torch.cuda.get_device_name()}", "header": HEADER, "rows": _rows(sizes)}]
        finally:
            dist.destroy_process_group()


def _rows(sizes: dict[str, Any]) -> list[list[str]]:
    makers: dict[str, Callable[[dict[str, Any]], Callable[[], torch.Tensor]]] = {
        "none": _eager, "fsdp2": _fsdp2,
        **{strategy: lambda s, strategy=strategy: _ours(s, strategy, fs.init_mesh(device="cuda")) for strategy in OURS},
    }  # fmt: skip
    rows, losses = [], {}
    plain = 0.0
    for peer in PEERS:  # one after another, because the GPU's memory does not hold several peers
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run = makers[peer](sizes)
        walls, hosts, found = [], [], []
        for i in range(WARM + ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = run()
            issued = time.perf_counter()
            torch.cuda.synchronize()
            if i >= WARM:
                walls.append(time.perf_counter() - start)
                hosts.append(issued - start)
            found.append(loss.item())
        losses[peer] = found
        if any(abs(a - b) > LIMIT * abs(b) for a, b in zip(found, losses["none"], strict=True)):
            raise ValueError(f"{TITLES[peer]} does not compute the losses of plain eager: {found}, not {losses['none']}")
        wall, host = statistics.median(walls), statistics.median(hosts)
        plain = plain or wall
        units = sizes["num_hidden_layers"] + 1
        peak = torch.cuda.max_memory_allocated() / 2**30
        milliseconds = [TITLES[peer], f"{1e3 * wall:.1f}", f"{wall / plain:.2f}", f"{1e3 * host:.1f}"]
        rows.append([*milliseconds, f"{1e6 * host / units:.0f}", f"{peak:.2f}"])
        del run, loss
    return rows


def _model(sizes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(LlamaConfig(**sizes)).train()
    finally:
        torch.set_default_dtype(usual)


def _tokens(sizes: dict[str, Any]) -> torch.Tensor:
    return torch.randint(sizes["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)).to("cuda")


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _plain(model: Any, sizes: dict[str, Any]) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = _tokens(sizes)

    def run() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(model(tokens).logits, tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def _eager(sizes: dict[str, Any]) -> Callable[[], torch.Tensor]:
    return _plain(_model(sizes), sizes)


def _fsdp2(sizes: dict[str, Any]) -> Callable[[], torch.Tensor]:
    model = _model(sizes)
    mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
    return _plain(sharded_by_fsdp2(model, type(model.model.layers[0]), mesh=mesh), sizes)


def _ours(sizes: dict[str, Any], strategy: str, mesh: fs.Mesh) -> Callable[[], torch.Tensor]:
    model = _model(sizes)
    units = fs.wrap.by_class(type(model.model.layers[0]))(model)
    apply, params, buffers = fs.make_functional(model)
    del model
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    loss_fn = lambda shards, buffers, tokens: _loss(sharded(shards, buffers, tokens).logits, tokens)  # noqa: E731
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    del params
    tokens = _tokens(sizes)

    def run() -> torch.Tensor:
        nonlocal state
        state, metrics = step(state, tokens)
        return metrics["loss"]

    return run
