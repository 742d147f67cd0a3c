"""Under torch.autocast, the casts of a unit's leaves are freed with the unit, and change no bit."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs
from tests.pairwise import crossed
from tests.ranks import run_simulated

Saved = list[tuple[torch.dtype, tuple[int, ...]]]


class Uses(nn.Module):
    """A residual block that reads its weight in the ways that autocast casts for."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        shape = {"conv1d": (6, 6, 3), "bmm": (4, 6, 6), "wide": (12, 6)}.get(use, (6, 6))
        self.weight = nn.Parameter(torch.randn(shape) / 3)
        self.bias = nn.Parameter(torch.randn(shape[0]) / 3)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.used(self.norm(x)))

    def used(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        match self.use:
            case "linear":
                return F.linear(x, w, self.bias)
            case "wide":
                return F.linear(x, w, self.bias).chunk(2, -1)[0]
            case "T":
                return x @ w.T + self.bias
            case "mT":
                return x @ w.mT
            case "plain":
                return x @ w
            case "permuted":
                return torch.matmul(x, w.permute(0, 1))
            case "part":
                return F.linear(x[..., :3], w[:, :3])
            case "einsum":
                return torch.einsum("bti,oi->bto", x, w)
            case "bmm":
                return torch.bmm(x, w)
            case "conv1d":
                return F.conv1d(x.mT, w, self.bias, padding=1).mT
            case "written":
                cast = w.to(torch.bfloat16)
                cast.mul_(2)
                return F.linear(x, cast)
            case "scaled":
                return F.linear(x, w * 0.5)
            case "by hand":
                return F.linear(x.to(torch.bfloat16), w.to(torch.bfloat16)).float()
            case "contiguous":
                return x.to(torch.bfloat16) @ w.T.to(torch.bfloat16, memory_format=torch.contiguous_format)
        raise AssertionError(self.use)


class Net(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Uses(use) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), torch.arange(x.shape[0] * x.shape[1]) % 5)


def build(use: str) -> Net:
    torch.manual_seed(0)
    return Net(use)


def batch() -> torch.Tensor:
    return torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1))


def autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


def plain(use: str, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    net = build(use)
    with autocast(dtype):
        loss = net(batch())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def ours(mesh: fs.Mesh, use: str, dtype: torch.dtype, hooks: Any = contextlib.nullcontext, **options: Any) -> Any:
    net = build(use)
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=fs.wrap.by_class(Uses)(net), reshard_after_forward=True, **options)
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any) -> torch.Tensor:
        with autocast(dtype), hooks():
            return sharded(shards, buffers, batch())

    with fs.record_events() as events:
        loss, grads = fs.value_and_grad(loss_fn, allow_constant=True)(fs.shard(params, plan, mesh))
    assert tuple(events) == fs.predict_events(plan, sharded.schedule)
    return loss, fs.gather(grads, plan, mesh)


USES = [
    "linear", "wide", "T", "mT", "plain", "permuted", "part", "einsum", "bmm", "conv1d", "written", "scaled", "by hand",
    "contiguous",
]  # fmt: skip


@pytest.mark.slow
@crossed(use=USES, dtype=[torch.bfloat16, torch.float16], world=[1, 2])
def test_losses_and_gradients_under_autocast_are_those_of_the_module_to_the_bit(
    use: str, dtype: torch.dtype, world: int
) -> None:
    loss, expected = plain(use, dtype)

    def main(mesh: fs.Mesh) -> None:
        found, grads = ours(mesh, use, dtype)
        assert torch.equal(found, loss)
        for name, grad in expected.items():
            assert torch.equal(grads[name], grad), name

    run_simulated(main, world)


def saved_beside(run: Callable[[Callable[[], Any]], Any]) -> Saved:
    """Return dtype and shape of the tensors that autograd keeps between forward and backward."""
    kept: Saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor.detach()

    run(lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
    return kept


@pytest.mark.parametrize("use", ["linear", "wide", "T", "mT", "plain", "bmm", "conv1d", "by hand"])
def test_autograd_keeps_no_cast_of_a_leaf_of_a_unit(use: str) -> None:
    weight = build(use).blocks[0].weight
    shapes = {tuple(weight.shape), tuple(weight.mT.shape)}

    def main(mesh: fs.Mesh) -> None:
        kept = saved_beside(lambda hooks: ours(mesh, use, torch.bfloat16, hooks))
        assert kept, "the hooks saw what autograd keeps"
        assert not [shape for dtype, shape in kept if shape in shapes]

    run_simulated(main, 2)


def test_a_cast_that_was_written_to_is_kept_as_it_is() -> None:
    def main(mesh: fs.Mesh) -> None:
        kept = saved_beside(lambda hooks: ours(mesh, "written", torch.bfloat16, hooks))
        assert (torch.bfloat16, (6, 6)) in kept

    run_simulated(main, 1)


def second_derivative(net: nn.Module, run: Callable[[Any], torch.Tensor], params: Any) -> Any:
    leaves = list(params)
    grads = torch.autograd.grad(run(batch()), leaves, create_graph=True, allow_unused=True)
    norm = sum(grad.square().sum() for grad in grads if grad is not None)
    assert isinstance(norm, torch.Tensor)
    return torch.autograd.grad(norm, leaves, allow_unused=True)


@pytest.mark.parametrize("use", ["linear", "T", "bmm"])
def test_a_gradient_of_a_gradient_differentiates_through_the_cast(use: str) -> None:
    net = build(use)

    def cast(x: torch.Tensor) -> torch.Tensor:
        with autocast():
            return net(x)

    expected = second_derivative(net, cast, net.parameters())

    def main(mesh: fs.Mesh) -> None:
        apply, params, buffers = fs.make_functional(net)
        plan = fs.make_plan(params, mesh, units=fs.wrap.by_class(Uses)(net))
        sharded = fs.fully_shard(apply, plan, mesh)
        shards = fs.shard(params, plan, mesh)
        leaves = {name: {key: local.requires_grad_() for key, local in unit.items()} for name, unit in shards.items()}

        def run(x: torch.Tensor) -> torch.Tensor:
            with autocast():
                return sharded(leaves, buffers, x)

        flat = [local for unit in leaves.values() for local in unit.values()]
        found = iter(second_derivative(net, run, flat))
        grads = {name: {key: next(found) for key in unit} for name, unit in leaves.items()}
        gathered = fs.gather(grads, plan, mesh)
        for (name, _), grad in zip(net.named_parameters(), expected, strict=True):
            if grad is not None:
                torch.testing.assert_close(gathered[name], grad)

    run_simulated(main, 1)
