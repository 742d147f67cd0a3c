"""``output_dtype``: which outputs of a model and of its units are cast, and which are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

import funcshard as fs
from funcshard.plan.wrap import Units
from tests.ranks import run_ranks

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LOW = fs.MixedPrecision(BF16, FP32, output_dtype=FP32)


class Several(nn.Module):
    """Returns tensors of several kinds, and may count its calls in a buffer."""

    def __init__(self, owns: bool, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4)) if owns else 1.0
        self.register_buffer("mean", torch.full((4,), 1 / 3, dtype=FP64))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.first(x)
        if self.counts:
            self.mean = self.mean + 1 / 3
        out = self.second(h) * self.scale
        return {"out": out, "ids": out.argmax(1), "pair": (h, "text"), "none": None, "inside": h.dtype}


def run(mesh: fs.Mesh, *, owns: bool = True, mutable: bool = False, evaluate: bool = False, **precision: Any) -> Any:
    apply, params, buffers = fs.make_functional(Several(owns, counts=mutable), mutable=mutable)
    options = {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32, **precision}
    plan = fs.make_plan(params, mesh, units=["first", "second"], precision=fs.MixedPrecision(**options))
    sharded = fs.fully_shard(apply.eval() if evaluate else apply, plan, mesh)
    return sharded(fs.shard(params, plan, mesh), buffers, torch.ones(2, 4))


@pytest.mark.parametrize("owns", [True, False], ids=["the root owns a leaf", "the root owns none"])
def test_floating_point_outputs_of_the_model_are_cast_and_those_of_its_units_are_not(owns: bool) -> None:
    for out in fs.simulate(lambda mesh: run(mesh, owns=owns), 2):
        assert (out["out"].dtype, out["ids"].dtype, out["pair"][0].dtype) == (FP32, torch.int64, FP32)
        assert (out["pair"][1], out["none"]) == ("text", None)
        assert out["inside"] == BF16
        assert torch.equal(out["out"], out["out"].bfloat16().float())  # computed in bfloat16


@pytest.mark.parametrize("owns", [True, False], ids=["the root owns a leaf", "the root owns none"])
def test_new_buffers_are_no_outputs(owns: bool) -> None:
    for out, buffers in fs.simulate(lambda mesh: run(mesh, owns=owns, mutable=True, output_dtype=FP16), 2):
        assert out["out"].dtype == FP16
        assert torch.equal(buffers["mean"], torch.full((4,), 1 / 3, dtype=FP64) + 1 / 3)


def test_evaluation_in_full_precision_casts_no_outputs() -> None:
    for full, dtype in ((False, FP16), (True, FP32)):
        options: dict[str, Any] = {"evaluate": True, "full_precision_in_eval": full, "output_dtype": FP16}
        for out in fs.simulate(lambda mesh, options=options: run(mesh, **options), 2):
            assert out["out"].dtype == dtype


def test_without_a_param_dtype_outputs_are_cast_too() -> None:
    for out in fs.simulate(lambda mesh: run(mesh, param_dtype=None, output_dtype=FP64), 2):
        assert (out["inside"], out["out"].dtype) == (FP32, FP64)


def net_of_three(dtype: torch.dtype = FP32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(dtype)


OWN = fs.MixedPrecision(BF16, FP32, output_dtype=FP32, cast_forward_inputs=True)


@pytest.mark.parametrize("remat", [(), ("2",)], ids=["plain", "remat"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_unit_with_a_precision_of_its_own_casts_its_own_outputs(remat: Any, strategy: str) -> None:
    apply, params, _ = fs.make_functional(net_of_three())
    x = torch.linspace(-1, 1, 12).view(2, 6)

    def main(mesh: fs.Mesh) -> Any:
        units = Units(["0", "2"], {"2": {"precision": OWN}})
        plan = fs.make_plan(params, mesh, units=units, strategy=strategy)
        sharded = fs.fully_shard(apply, plan, mesh, remat=remat)
        shards = fs.shard(params, plan, mesh)
        loss, grads = fs.value_and_grad(lambda s: sharded(s, {}, x).square().mean())(shards)
        return loss, fs.gather(grads, plan, mesh)

    net = net_of_three()
    low = net_of_three()[2].bfloat16()
    h = net[1](net[0](x))
    loss = net[4](net[3](low(h.bfloat16()).float())).square().mean()
    leaves = {"0.weight": net[0].weight, "2.weight": low.weight, "4.weight": net[4].weight}
    grads = dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True))
    for found, ours in fs.simulate(main, 2):
        assert torch.equal(found, loss.detach())
        assert all(torch.equal(ours[name], grad.float()) for name, grad in grads.items())


def test_a_unit_that_is_written_by_hand_casts_its_outputs() -> None:
    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan({"w": torch.ones(3)}, mesh, precision=LOW)
        f = fs.unshard(lambda leaves, x: (leaves["w"] * x, leaves["w"].dtype), plan.units[""], mesh)
        shards = fs.shard({"w": torch.ones(3)}, plan, mesh)
        out, inside = f(shards[""], torch.ones(3))
        return out.dtype, inside

    assert fs.simulate(main, 2) == [(FP32, BF16)] * 2


def test_the_default_lets_an_input_of_higher_precision_raise_or_promote_and_cast_forward_inputs_rounds_it() -> None:
    """docs/precision.md says why a unit's inputs stay as they are by default."""
    angles = torch.tensor([[1.0 + 2**-12]])

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
            return x * self.scale + angles

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Rotary()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x, angles)

    apply, params, _ = fs.make_functional(Model())

    def main(mesh: fs.Mesh) -> list[Any]:
        outs = []
        for cast in (False, True):
            precision = fs.MixedPrecision(BF16, cast_forward_inputs=cast)
            plan = fs.make_plan(params, mesh, units=["block"], precision=precision)
            out = fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), {}, torch.zeros(1, 1))
            outs.append((out.dtype, out.item() == angles.item()))
        return outs

    assert fs.simulate(main, 2) == [[(FP32, True), (BF16, False)]] * 2


# --- FSDP2 ----------------------------------------------------------------------------------------


def rows(mesh: fs.Mesh) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).chunk(mesh.world_size)[mesh.rank]


def theirs(mesh: fs.Mesh, everywhere: bool) -> Any:
    net = net_of_three()
    devices = init_device_mesh("cpu", (mesh.world_size,))
    casting = MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32)
    inner = casting if everywhere else MixedPrecisionPolicy(BF16, FP32)
    for name in ("0", "2", "4"):
        fsdp2(net.get_submodule(name), mesh=devices, mp_policy=inner)
    fsdp2(net, mesh=devices, mp_policy=casting)
    out = net(rows(mesh))
    out.square().mean().backward()
    return out.detach(), {name: leaf.grad.full_tensor() for name, leaf in net.named_parameters()}  # type: ignore[union-attr]


def ours(mesh: fs.Mesh, everywhere: bool) -> Any:
    apply, params, _ = fs.make_functional(net_of_three())
    names = ["0", "2", "4"]
    units = Units(names, {name: {"precision": OWN} for name in names} if everywhere else {})
    plan = fs.make_plan(params, mesh, units=units, precision=LOW)
    sharded, outs = fs.fully_shard(apply, plan, mesh), []

    def loss_fn(shards: Any) -> torch.Tensor:
        outs.append(sharded(shards, {}, rows(mesh)))
        return outs[0].square().mean()

    grads = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))[1]
    return outs[0].detach(), fs.gather(grads, plan, mesh)


def compare(mesh: fs.Mesh) -> None:
    for everywhere in (False, True):
        (out, grads), (their_out, their_grads) = ours(mesh, everywhere), theirs(mesh, everywhere)
        assert out.dtype == their_out.dtype == FP32
        assert torch.equal(out, their_out)
        assert all(torch.equal(grads[name], their_grads[name]) for name in grads)


@pytest.mark.slow
def test_on_processes_outputs_and_gradients_are_those_of_fsdp2_to_the_bit() -> None:
    run_ranks(compare, 2)
