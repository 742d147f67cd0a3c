"""One GPU, world size 1: a Llama of a billion parameters in bfloat16, against plain eager and FSDP2.

It needs a CUDA device with about 20 GiB free and ``transformers``; elsewhere its table says that nothing was measured.
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
from benchmarks.peers import TITLES, sharded_by_fsdp2

__all__ = ["tables"]

SIZES = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
BATCH, LENGTH, ROUNDS, WARM = 2, 512, 10, 3
LIMIT = 1e-2  # bfloat16 rounds at 4e-3
HEADER = ["peer", "ms a step", "÷ plain eager", "host ms a step", "host µs a unit", "peak GiB"]


def missing() -> str:
    """Return what this machine lacks for the measurement, ``""`` for nothing."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return ""


def tables(sizes: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Measure, and return the table; where something is missing, a table that says so."""
    title = "Llama, 1.2 G parameters in bfloat16, 1 GPU"
    lacking = missing()
    if lacking:
        return [{"title": title, "header": ["peer", "result"], "rows": [["all", f"not measured: {lacking}"]]}]
    with tempfile.TemporaryDirectory(prefix="race-") as directory:
        dist.init_process_group("nccl", store=dist.FileStore(str(Path(directory) / "store"), 1), rank=0, world_size=1)
        try:
            return [{"title": f"{title}: {torch.cuda.get_device_name()}", "header": HEADER, "rows": _rows(sizes or SIZES)}]
        finally:
            dist.destroy_process_group()


def _rows(sizes: dict[str, Any]) -> list[list[str]]:
    makers: dict[str, Callable[[dict[str, Any]], Callable[[], torch.Tensor]]] = {
        "none": _eager, "fsdp2": _fsdp2, "full_shard": lambda s: _ours(s, "full_shard"),
        "shard_grad_op": lambda s: _ours(s, "shard_grad_op"),
    }  # fmt: skip
    rows, losses = [], {}
    plain = 0.0
    for peer, make in makers.items():  # one after another: together they would not leave each other memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run = make(sizes)
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
            raise ValueError(f"{TITLES[peer]} computes something else than plain eager: {found}, not {losses['none']}")
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
    with torch.device("cuda"):
        return LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).train()


def _tokens(sizes: dict[str, Any]) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(1)
    return torch.randint(sizes["vocab_size"], (BATCH, LENGTH), generator=g, device="cuda")


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


def _ours(sizes: dict[str, Any], strategy: str) -> Callable[[], torch.Tensor]:
    mesh = fs.init_mesh(device="cuda")
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
