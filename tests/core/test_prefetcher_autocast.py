"""Under torch.autocast, the casts of a unit's leaves are freed with the unit, and change no bit."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import of_module, recorded, requiring_grad, same_bits
from tests.module.law import Runs
from tests.ranks import on_ranks

BF16 = torch.bfloat16


def written(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cast = w.to(BF16)
    cast.mul_(2)
    return F.linear(x, cast)


# Ways to read a weight that autocast casts for, as functions of the weight, a bias and an input.
USES: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda w, b, x: F.linear(x, w, b),
    "wide": lambda w, b, x: F.linear(x, w, b).chunk(2, -1)[0],
    "T": lambda w, b, x: x @ w.T + b,
    "mT": lambda w, b, x: x @ w.mT,
    "plain": lambda w, b, x: x @ w,
    "permuted": lambda w, b, x: torch.matmul(x, w.permute(0, 1)),
    "part": lambda w, b, x: F.linear(x[..., :3], w[:, :3]),
    "einsum": lambda w, b, x: torch.einsum("bti,oi->bto", x, w),
    "bmm": lambda w, b, x: torch.bmm(x, w),
    "conv1d": lambda w, b, x: F.conv1d(x.mT, w, b, padding=1).mT,
    "written": written,
    "scaled": lambda w, b, x: F.linear(x, w * 0.5),
    "by hand": lambda w, b, x: F.linear(x.to(BF16), w.to(BF16)).float(),
    "contiguous": lambda w, b, x: x.to(BF16) @ w.T.to(BF16, memory_format=torch.contiguous_format),
}


def block(use: str) -> nn.Module:
    """Return a residual block that reads its weight in one of these ways."""
    run = lambda block, x: x + torch.tanh(USES[use](block.weight, block.bias, block.norm(x)))  # noqa: E731
    shape = {"conv1d": (6, 6, 3), "bmm": (4, 6, 6), "wide": (12, 6)}.get(use, (6, 6))
    weight, bias = nn.Parameter(torch.randn(shape) / 3), nn.Parameter(torch.randn(shape[0]) / 3)
    return Runs(run, weight=weight, bias=bias, norm=nn.LayerNorm(6))


def build(use: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(block(use), block(use), nn.Linear(6, 5))


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), torch.arange(out.shape[0] * out.shape[1]) % 5)


def batch() -> torch.Tensor:
    return torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1))


def autocast(dtype: torch.dtype = BF16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


def plain(use: str, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    net = build(use)
    with autocast(dtype):
        loss = loss_of(net(batch()))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def ours(mesh: fs.Mesh, use: str, dtype: torch.dtype, hooks: Any = contextlib.nullcontext) -> Any:
    plan, sharded, shards = of_module(mesh, build(use), ["0", "1"], reshard_after_forward=True)

    def loss_fn(shards: Any) -> torch.Tensor:
        with autocast(dtype), hooks():
            return loss_of(sharded(shards, {}, batch()))

    (loss, grads), events = recorded(fs.value_and_grad(loss_fn), shards)
    assert events == fs.predict_events(plan, sharded.schedule)
    return loss, fs.gather(grads, plan, mesh)


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_losses_and_gradients_under_autocast_are_those_of_the_module_to_the_bit(
    mesh: fs.Mesh, use: str, dtype: torch.dtype
) -> None:
    loss, expected = plain(use, dtype)
    found, grads = ours(mesh, use, dtype)
    same_bits((found, {name: grads[name] for name in expected}), (loss, expected))


def saved_beside(mesh: fs.Mesh, use: str) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of the tensors that hooks around the units get between forward and backward."""
    kept = []

    def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
        kept.append((tensor.dtype, tuple(tensor.shape)))
        packed.append([tensor.detach()])
        return packed[-1]

    packed: list[list[torch.Tensor]] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, list.pop)
    same_bits(ours(mesh, use, torch.bfloat16, lambda: hooks), ours(mesh, use, torch.bfloat16))
    assert packed == [[]] * len(kept)  # backward takes each
    return kept


@pytest.mark.parametrize("use", ["linear", "wide", "T", "mT", "plain", "bmm", "conv1d", "by hand"])
@on_ranks(2)
def test_autograd_keeps_no_cast_of_a_leaf_of_a_unit(mesh: fs.Mesh, use: str) -> None:
    weight = build(use)[0].weight
    shapes = {tuple(weight.shape), tuple(weight.mT.shape)}
    kept = saved_beside(mesh, use)
    assert kept, "the hooks saw what autograd keeps"
    assert not [shape for dtype, shape in kept if shape in shapes]


@on_ranks(1)
def test_a_cast_that_was_written_to_is_kept_as_it_is(mesh: fs.Mesh) -> None:
    assert (torch.bfloat16, (6, 6)) in saved_beside(mesh, "written")


@pytest.mark.parametrize("use", ["linear", "T", "bmm"])
def test_a_gradient_of_a_gradient_differentiates_through_the_cast(use: str) -> None:
    net, mesh = build(use), fs.Mesh()
    plan, sharded, shards = of_module(mesh, net, ["0", "1"])

    def second_derivative(run: Callable[[], torch.Tensor], params: Any) -> Any:
        leaves = list(params)
        with autocast():
            loss = loss_of(run())
        grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        norm = sum(grad.square().sum() for grad in grads if grad is not None)
        return torch.autograd.grad(norm, leaves, allow_unused=True)

    expected = second_derivative(lambda: net(batch()), net.parameters())
    found = iter(second_derivative(lambda: sharded(shards, {}, batch()), tree.leaves(requiring_grad(shards))))
    gathered = fs.gather(tree.map(lambda _: next(found), shards), plan, mesh)
    for (name, _), grad in zip(net.named_parameters(), expected, strict=True):
        if grad is not None:
            torch.testing.assert_close(gathered[name], grad)
