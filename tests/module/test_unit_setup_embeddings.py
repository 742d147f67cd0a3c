"""Embeddings that ask torch for sparse gradients: those of a unit get the dense ones of the plain module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.core.units import forward_mode, of_module
from tests.module.law import Runs, calls_on, plain_call

ids = torch.tensor([[1, 2, 2], [4, 0, 1]])
EMBEDDINGS: dict[str, tuple[Callable[..., nn.Module], list[str]]] = {
    "a unit": (nn.Embedding, ["table"]),
    "in the root": (nn.Embedding, []),
    "a bag": (lambda *sizes, sparse: nn.EmbeddingBag(*sizes, mode="sum", sparse=sparse), ["table"]),
}


def model(make: Callable[..., nn.Module], *, sparse: bool) -> nn.Module:
    torch.manual_seed(0)
    table = make(5, 4, sparse=sparse)
    return Runs(lambda m, x: m.head(torch.tanh(m.table(x))), table=table, head=nn.Linear(4, 2)).double()


@pytest.mark.parametrize(("make", "units"), EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_a_sparse_embedding_has_the_gradients_of_a_dense_one(make: Any, units: Any) -> None:
    losses, grads = plain_call(model(make, sparse=False), ids, 2)
    for call in calls_on(2, fs.make_functional(model(make, sparse=True)), ids, units):
        torch.testing.assert_close([call.loss, call.grads], [losses[0], grads])


@forward_mode
def test_a_sparse_embedding_has_products_with_the_hessian() -> None:
    def product(mesh: fs.Mesh, sparse: bool) -> Any:
        plan, sharded, shards = of_module(mesh, model(nn.Embedding, sparse=sparse), ["table"])
        loss_fn = lambda shards: sharded(shards, {}, ids).square().mean()  # noqa: E731
        return fs.gather(fs.hvp(loss_fn, (shards,), (shards,)), plan, mesh)

    for found in fs.simulate(lambda mesh: (product(mesh, sparse=True), product(mesh, sparse=False)), 2):
        torch.testing.assert_close(*found)


def test_an_ignored_embedding_keeps_its_sparse_gradient() -> None:
    apply, params, _ = fs.make_functional(model(nn.Embedding, sparse=True))
    own = {"table.weight": params.pop("table.weight")}

    def main(mesh: fs.Mesh) -> bool:
        plan = fs.make_plan(params, mesh)
        sharded = fs.fully_shard(apply, plan, mesh, ignored_params=["table.weight"])
        weight = own["table.weight"].detach().requires_grad_()
        loss = sharded(fs.shard(params, plan, mesh), {"table.weight": weight}, ids).sum()
        return torch.autograd.grad(loss, weight)[0].is_sparse

    assert fs.simulate(main, 1) == [True]
