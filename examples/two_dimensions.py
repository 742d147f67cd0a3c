"""torchrun --nproc-per-node 4 examples/two_dimensions.py --steps 10

Train a small Llama with hybrid sharding and tensor parallelism, on the bytes of this file. Two
other ways to run it:

    torchrun --nproc-per-node 8 examples/two_dimensions.py --replicate 2
    python examples/two_dimensions.py --simulate 4 --replicate 2 --tensor 1

The mesh has the axes replicate × shard × tensor. torch's ``parallelize_module`` cuts the linear
layers along the tensor axis, so their parameters are DTensors. funcshard cuts each rank's part of
them along the shard axis, and repeats it along the replicate axis. DTensors need process groups, so
simulated ranks have no tensor axis.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import funcshard as fs

CONTEXT = 64


def make_llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """Return the model; every rank makes the same one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def cut_along_tensor(model: LlamaForCausalLM, mesh: fs.Mesh) -> LlamaForCausalLM:
    """Cut the linear layers along the tensor axis: by columns at first, then by rows."""
    tensor = mesh.device_mesh["tensor"]
    column, row = ColwiseParallel, RowwiseParallel
    embed = row(input_layouts=Replicate())  # the vocabulary is cut, and so are the logits
    head = column(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, tensor, {"model.embed_tokens": embed, "lm_head": head})
    for layer in model.model.layers:
        columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
        rows = ["self_attn.o_proj", "mlp.down_proj"]
        parallelize_module(layer, tensor, {**{name: column() for name in columns}, **{name: row() for name in rows}})
    return model


def batches(mesh: fs.Mesh, samples: int, steps: int) -> Any:
    """Yield this rank's part of each batch: the ranks along tensor have the same samples."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (samples,), generator=generator)
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        data_rank = fs.axis_index(mesh, axis=("replicate", "shard"))
        yield batch.chunk(mesh.shape["replicate"] * mesh.shape["shard"])[data_rank].to(mesh.device)


def train(mesh: fs.Mesh, steps: int, samples: int = 16, dtype: torch.dtype = torch.float32) -> list[float]:
    """Train, and return the loss of each step."""
    divided = mesh.shape.get("tensor", 1) > 1
    model = cut_along_tensor(make_llama(dtype), mesh) if divided else make_llama(dtype)
    apply, params, buffers = fs.make_functional(model)
    plan = fs.make_plan(params, mesh, units=["model.layers.*"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = sharded(shards, buffers, input_ids=ids[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    warm_up = lambda step: 3e-3 * min(1.0, (step + 1) / 10)  # noqa: E731
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=warm_up, weight_decay=0.1)
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, max_norm=1.0)
    state, losses = step.init(fs.shard(params, plan, mesh), buffers), []
    if mesh.rank == 0:
        print(plan)
    with loss_parallel() if divided else contextlib.nullcontext():  # the logits of a token are on several ranks
        for number, batch in enumerate(batches(mesh, samples, steps)):
            start = time.perf_counter()
            with fs.record_events() as events:
                state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
            sent = Counter[str]()
            for event in events:
                sent[event.axis] += event.traffic
            if mesh.rank == 0:
                along = ", ".join(f"{size / 1024:.0f} KiB along {axis}" for axis, size in sent.items())
                # The collectives of DTensors are torch's own, and no events.
                print(
                    f"step {number}: loss {losses[-1]:.4f}, {time.perf_counter() - start:.2f} s; sent {along or 'nothing'}"
                )
    return losses


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--replicate", type=int, default=1, help="number of copies of the shards")
    parser.add_argument("--tensor", type=int, default=2, help="number of ranks that divide each layer")
    parser.add_argument("--simulate", type=int, metavar="RANKS", help="simulate ranks in this process")
    options = parser.parse_args()
    if options.simulate and options.tensor > 1:
        parser.error("simulated ranks have no process groups, which DTensors need: pass --tensor 1 with --simulate")
    ranks = options.simulate or int(os.environ.get("WORLD_SIZE", "1"))
    shape = {
        "replicate": options.replicate,
        "shard": ranks // (options.replicate * options.tensor),
        "tensor": options.tensor,
    }
    if options.simulate:
        fs.simulate(lambda mesh: train(mesh, options.steps), shape)
        return
    train(fs.init_mesh(shape), options.steps)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
