"""Modules that torch's tensor parallelism has cut train as unsharded ones, and as under FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import funcshard as fs
from tests.ranks import close_pool, run_ranks

VOCABULARY, WIDTH, LENGTH, STEPS, SAMPLES = 16, 8, 6, 2, 4  # in the second step the optimizer has state
ADAMW = {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1}  # see OPTIMIZERS in tests/jobs.py for the large eps


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def parallelized(model: Model, tensor: Any) -> Model:
    """Cut a model as torch's tutorial does: activations between blocks are cut along the sequence."""
    cut, rest = Shard(1), {"use_local_output": False}
    column, row = ColwiseParallel(input_layouts=cut), RowwiseParallel(output_layouts=cut, **rest)
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=cut, **rest)
    head = ColwiseParallel(input_layouts=cut, output_layouts=Shard(-1), **rest)
    parallelize_module(model, tensor, {"embed": embed, "norm": SequenceParallel(), "head": head})
    for block in model.blocks:
        styles = {"norm": SequenceParallel(), "norm2": SequenceParallel(), "o": row, "down": row}
        parallelize_module(block, tensor, styles | dict.fromkeys(["q", "k", "v", "up"], column))
    return model


def batches() -> torch.Tensor:
    return torch.randint(VOCABULARY, (STEPS, SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def rows(mesh: fs.Mesh, batch: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank: others along the data axes, the same along the tensor axis."""
    position, shape = mesh.position, mesh.shape
    return batch.chunk(shape["replicate"] * shape["shard"])[position["replicate"] * shape["shard"] + position["shard"]]


def loss_of(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def whole(tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for name, x in tree.items()}


# --- three ways to train --------------------------------------------------------------------------


def train_unsharded(dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(dtype)
    optimizer, losses = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model(batch[:, :-1]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, whole(dict(model.named_parameters()))


def train_fsdp2(mesh: fs.Mesh, dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    model = parallelized(build(dtype), mesh.device_mesh["tensor"])
    for part in (*model.blocks, model):
        fsdp2(part, mesh=mesh.device_mesh["shard"], **options)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    with loss_parallel():
        for batch in (rows(mesh, batch) for batch in batches()):
            optimizer.zero_grad()
            loss_of(model(batch[:, :-1]), batch).backward()
            optimizer.step()
    return whole(dict(model.named_parameters()))


def train(
    mesh: fs.Mesh, dtype: torch.dtype, *, traced: bool = False, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = parallelized(build(dtype), mesh.device_mesh["tensor"])
    apply, params, buffers = fs.make_functional(model)
    plan = fs.make_plan(params, mesh, units=["blocks.*"], **options)
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(sharded(shards, buffers, batch[:, :-1]), batch)

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, **ADAMW), plan, mesh)
    state, losses = step.init(fs.shard(params, plan, mesh), buffers), []
    with loss_parallel(), fs.record_events() as events:
        take = fs.trace(step, state, rows(mesh, batches()[0])) if traced else step
        for batch in batches():
            state, metrics = take(state, rows(mesh, batch))
            losses.append(metrics["loss"].item())
    of_units = [event for event in events if event.unit is not None]
    assert of_units == list(fs.predict_events(plan, sharded.schedule)) * STEPS
    gathered = fs.gather(state.shards, plan, mesh)
    for name, value in params.items():  # the tree that was given
        assert (type(gathered[name]), gathered[name].placements) == (DTensor, value.placements), name
    return losses, whole(gathered)


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


# --- real processes -------------------------------------------------------------------------------


def on_four_ranks(mesh: fs.Mesh) -> dict[str, float]:
    assert with_buffers(mesh)[-1] == [1.0]  # of the first data rank
    found = {}
    losses, reference = train_unsharded(torch.float64)
    own_losses, own = train(mesh, torch.float64)
    found["unsharded"] = difference(own, reference)
    found["losses"] = max(abs(a - b) for a, b in zip(own_losses, losses, strict=True))
    # Why not a reduce_dtype of float32: FSDP2 of torch 2.15 also adds along the tensor axis in it.
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    peer = train_fsdp2(mesh, torch.float32, mp_policy=MixedPrecisionPolicy(**half))
    _, own = train(mesh, torch.float32, precision=fs.MixedPrecision(**half, cast_forward_inputs=True))
    found["bfloat16, FSDP2"] = difference(own, peer)
    return found


@pytest.mark.slow
def test_two_dimensions_train_as_the_unsharded_model_and_as_fsdp2() -> None:
    # Why new processes: where there were other groups before, FSDP2's DTensors once looked for one of those.
    close_pool()
    for found in run_ranks(on_four_ranks, 4, shape={"shard": 2, "tensor": 2}, timeout=120):
        assert all(value == 0 if "FSDP2" in name else value < 1e-13 for name, value in found.items()), found


def initialised(mesh: fs.Mesh) -> dict[str, torch.Tensor]:
    """Return the parameters of a model that was cut on the meta device and initialised then."""
    with torch.device("meta"):
        model = Model()
    model = parallelized(model, mesh.device_mesh["tensor"])
    plan = fs.make_plan(fs.make_functional(model)[1], mesh, units=["blocks.*"])
    torch.manual_seed(0)
    return whole(fs.gather(fs.init_module(model, plan, mesh)[0], plan, mesh))


class Scaled(nn.Module):
    """A norm with buffers, which torch makes DTensors too; each forward changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += torch.ones_like(self.calls)
        return x * self.weight * self.scale


def with_buffers(mesh: fs.Mesh) -> tuple[float, list[float], list[float], list[float]]:
    """Return loss, gradient and the changed buffer of two calls, and the buffer of a step of ranks that differ.

    The loss is a DTensor that is still to be added up.
    """
    model = parallelize_module(nn.Sequential(Scaled()), mesh.device_mesh["tensor"], {"0": SequenceParallel()})
    apply, params, buffers = fs.make_functional(model, mutable=True)
    plan = fs.make_plan(params, mesh)
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    x = torch.full((2, 3, WIDTH), float(1 + mesh.rank))  # this rank's part of the sequence

    def loss_fn(shards: Any, buffers: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        out, new_buffers = sharded(shards, buffers, x)
        return out.sum(), new_buffers

    for _ in range(2):
        (loss, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(shards, buffers, x)
    assert isinstance(buffers["0.calls"], DTensor)
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD), plan, mesh, mutable=True)
    state, _ = step(step.init(shards, {**buffers, "0.calls": buffers["0.calls"] * mesh.shard.rank}), x)
    calls = [each["0.calls"].full_tensor().tolist() for each in (buffers, state.buffers)]
    return loss.item(), grads[""]["float32"].tolist(), *calls


def on_two_ranks(mesh: fs.Mesh) -> list[float]:
    assert difference(initialised(mesh), whole(dict(build(torch.float32).named_parameters()))) == 0
    assert with_buffers(mesh) == (2 * 3 * WIDTH * 2.0 * (1 + 2), [2 * 3 * 2.0 * (1 + 2)] * WIDTH, [2.0], [1.0])
    _, reference = train_unsharded(torch.float64)
    kept, (losses, repeated) = (train(mesh, torch.float64, strategy=how) for how in ("full_shard", "no_shard"))
    # Collectives of DTensors are operations of the graph.
    traced = train(mesh, torch.float64, strategy="no_shard", traced=True)
    assert (traced[0], difference(traced[1], repeated)) == (losses, 0.0)
    return [difference(kept[1], reference), difference(repeated, reference)]


@pytest.mark.nightly
def test_one_dimension_trains_as_the_unsharded_model() -> None:
    for found in run_ranks(on_two_ranks, 2, shape={"tensor": 2}):
        assert max(found) < 1e-13, found


# --- Hugging Face ---------------------------------------------------------------------------------


def llama(mesh: fs.Mesh) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **sizes)
    torch.manual_seed(0)
    reference = LlamaForCausalLM(config).double()
    # As from_pretrained(tp_plan="auto") does, for which transformers needs another package.
    _, _, meshes = LlamaForCausalLM.prepare_distribute_model(
        way := DistributedConfig(tp_size=mesh.world_size, tp_plan="auto")
    )
    model = LlamaForCausalLM.maybe_distribute_model(copy.deepcopy(reference), way, meshes)
    mesh = fs.Mesh.from_device_mesh(model._device_mesh, names={"fsdp": "shard"})
    apply, params, buffers = fs.make_functional(model)
    sharded_plan = fs.make_plan(params, mesh, units=["model.layers.*"])
    assert any(leaf.cuts for leaf in sharded_plan.units["model.layers.1"].leaves)
    sharded = fs.fully_shard(apply, sharded_plan, mesh)
    optimizer = torch.optim.AdamW(reference.parameters(), **ADAMW)
    loss_fn = lambda shards, buffers, batch: sharded(shards, buffers, input_ids=batch, labels=batch).loss  # noqa: E731
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, **ADAMW), sharded_plan, mesh)
    state = step.init(fs.shard(params, sharded_plan, mesh), buffers)
    for batch in batches():
        state, _ = step(state, rows(mesh, batch))
        optimizer.zero_grad()
        reference(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return difference(whole(fs.gather(state.shards, sharded_plan, mesh)), whole(dict(reference.named_parameters())))


@pytest.mark.slow
def test_a_llama_with_hugging_faces_tensor_parallel_plan_trains_as_without_one() -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(llama, 2, shape={"tensor": 2}):
        assert found < 1e-13
