"""Models of the parity tests, divided over two ranks by torch, equal the whole ones and FSDP2's runs."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import funcshard as fs
from funcshard.plan import match
from tests.models import SUBJECTS, part
from tests.promises.test_parity import ADAMW, tolerance, whole_batch
from tests.ranks import one_thread, run_ranks

GRID = {"shard": 2, "tensor": 2}
# Tied, grouped and encoding-decoding models, and one whose sizes are odd, so that nothing is cut.
NAMES = ("convnet", "bert", "llama", "t5")
STEPS, DTYPE = 2, torch.float64  # in the second step the optimizer has state


def divided(module: nn.Module, mesh: fs.Mesh) -> int:
    """Cut every linear layer and embedding whose sizes two ranks divide; return the number of cuts.

    Tied parameters stay whole, because torch's styles would untie them. Outputs are whole too, so
    that this works in any architecture.
    """
    uses = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    styles: dict[str, Any] = {}
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear | nn.Embedding) and name and uses.count(id(each.weight)) == 1:
            rows, columns = each.weight.shape
            if isinstance(each, nn.Embedding):
                if columns % 2 == 0:
                    styles[name] = ColwiseParallel(output_layouts=Replicate())
            elif rows % 2 == 0 and len(styles) % 2:
                styles[name] = ColwiseParallel(output_layouts=Replicate())
            elif columns % 2 == 0:
                styles[name] = RowwiseParallel(input_layouts=Replicate())
    assert mesh.device_mesh is not None
    parallelize_module(module, mesh.device_mesh["tensor"], styles)
    return sum(isinstance(p, DTensor) for p in module.parameters())


def rows_of(mesh: fs.Mesh, name: str, step: int) -> Any:
    return part(whole_batch(name, DTYPE, step, 2), fs.axis_index(mesh), 2)


def whole(named: Any) -> dict[str, torch.Tensor]:
    return {key: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for key, x in named}


def train_ours(mesh: fs.Mesh, name: str) -> tuple[int, list[float], dict[str, torch.Tensor], bool]:
    subject = SUBJECTS[name]
    module = subject.build().to(DTYPE)
    cuts = divided(module, mesh)
    apply, params, buffers = fs.make_functional(module, mutable=True)
    plan = fs.make_plan(params, mesh, units=subject.units)
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> Any:
        output, buffers = sharded(shards, buffers, **batch["inputs"])
        return subject.loss(output, batch), buffers

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, **ADAMW), plan, mesh, mutable=True)
    state, losses = step.init(fs.shard(params, plan, mesh), buffers), []
    for i in range(STEPS):
        with fs.record_events() as events:
            state, metrics = step(state, rows_of(mesh, name, i))
        losses.append(metrics["loss"].item())
    predicted = fs.predict_events(plan, sharded.schedule)
    as_predicted = sorted(map(str, predicted)) == sorted(str(event) for event in events if event.unit is not None)
    return cuts, losses, whole(fs.gather(state.shards, plan, mesh).items()), as_predicted


def train_fsdp2(mesh: fs.Mesh, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    subject = SUBJECTS[name]
    module = subject.build().to(DTYPE)
    divided(module, mesh)
    assert mesh.device_mesh is not None
    data = mesh.device_mesh["shard"]
    for path in match(subject.units, [(key,) for key, _ in module.named_parameters()], "unit"):
        fsdp2(module.get_submodule(path), mesh=data)
    fsdp2(module, mesh=data)
    optimizer, losses = torch.optim.AdamW(module.parameters(), **ADAMW), []
    for i in range(STEPS):
        batch = rows_of(mesh, name, i)
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            loss = subject.loss(module(**batch["inputs"]), batch)
        loss.backward()
        optimizer.step()
        losses.append(fs.pmean(loss.detach(), mesh).item())
    return losses, whole(module.named_parameters())


def train_all(mesh: fs.Mesh) -> dict[str, Any]:
    return {name: (train_ours(mesh, name), train_fsdp2(mesh, name)) for name in NAMES}


def train_whole(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the whole batch; with BatchNorm on the two halves, whose gradients are averaged."""
    subject = SUBJECTS[name]
    module = subject.build().to(DTYPE)
    optimizer, losses = torch.optim.AdamW(module.parameters(), **ADAMW), []
    parts = 2 if subject.batch_statistics else 1
    for i in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(parts):
            batch = part(whole_batch(name, DTYPE, i, 2), number, parts)
            loss = subject.loss(module(**batch["inputs"]), batch) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, whole(module.named_parameters())


@functools.cache
def outcome() -> list[dict[str, Any]]:
    return run_ranks(train_all, 4, shape=GRID, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_divided_over_two_ranks_trains_as_the_whole_one_and_as_under_fsdp2(name: str) -> None:
    with one_thread():
        losses, params = train_whole(name)
    close = functools.partial(
        torch.testing.assert_close, **dict.fromkeys(("rtol", "atol"), tolerance(SUBJECTS[name], DTYPE))
    )
    for own in outcome():
        (cuts, found, ours, as_predicted), (losses2, theirs) = own[name]
        assert (cuts > 0) == (name != "convnet")  # the sizes of its linear layer are odd, so all of it is repeated
        assert as_predicted
        close(found, losses)
        close(found, losses2)
        for key, value in ours.items():
            close(value, params[key], msg=lambda text, key=key: f"{key} against the whole model: {text}")
            close(value, theirs[key], msg=lambda text, key=key: f"{key} against FSDP2: {text}")
