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
from tests.module.law import calls_on, outputs_on, plain_call, same_bits, sharded_call
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


def run(*, owns: bool = True, mutable: bool = False, evaluate: bool = False, **precision: Any) -> Any:
    apply, *rest = fs.make_functional(Several(owns, counts=mutable), mutable=mutable)
    options = {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32, **precision}
    functional = (apply.eval() if evaluate else apply, *rest)
    (out,) = outputs_on(1, functional, torch.ones(2, 4), ["first", "second"], precision=fs.MixedPrecision(**options))
    return out


@pytest.mark.parametrize("owns", [True, False], ids=["the root owns a leaf", "the root owns none"])
def test_floating_point_outputs_of_the_model_are_cast_and_those_of_its_units_are_not(owns: bool) -> None:
    out = run(owns=owns)
    assert (out["out"].dtype, out["ids"].dtype, out["pair"][0].dtype) == (FP32, torch.int64, FP32)
    assert (out["pair"][1], out["none"]) == ("text", None)
    assert out["inside"] == BF16
    assert torch.equal(out["out"], out["out"].bfloat16().float())  # computed in bfloat16


@pytest.mark.parametrize("owns", [True, False], ids=["the root owns a leaf", "the root owns none"])
def test_new_buffers_are_no_outputs(owns: bool) -> None:
    out, buffers = run(owns=owns, mutable=True, output_dtype=FP16)
    assert out["out"].dtype == FP16
    assert torch.equal(buffers["mean"], torch.full((4,), 1 / 3, dtype=FP64) + 1 / 3)


@pytest.mark.parametrize(("full", "dtype"), [(False, FP16), (True, FP32)])
def test_evaluation_in_full_precision_casts_no_outputs(full: bool, dtype: torch.dtype) -> None:
    assert run(evaluate=True, full_precision_in_eval=full, output_dtype=FP16)["out"].dtype == dtype


def test_without_a_param_dtype_outputs_are_cast_too() -> None:
    out = run(param_dtype=None, output_dtype=FP64)
    assert (out["inside"], out["out"].dtype) == (FP32, FP64)


def net_of_three(dtype: torch.dtype = FP32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(dtype)


OWN = fs.MixedPrecision(BF16, FP32, output_dtype=FP32, cast_forward_inputs=True)


class Low(nn.Linear):
    """Computes in bfloat16, from its inputs to its float32 output, as a unit with ``OWN`` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(*(each.bfloat16() for each in (x, self.weight, self.bias))).float()


@pytest.mark.parametrize("remat", [(), ("2",)], ids=["plain", "remat"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_unit_with_a_precision_of_its_own_casts_its_own_outputs(remat: Any, strategy: str) -> None:
    net, x = net_of_three(), torch.linspace(-1, 1, 12).view(2, 6)
    units = Units(["0", "2"], {"2": {"precision": OWN}})
    found = calls_on(2, fs.make_functional(net), x, units, strategy=strategy, how={"remat": remat})
    net[2].__class__ = Low
    (loss,), grads = plain_call(net, x)
    for call in found:
        same_bits(call[:2], (loss, grads))


def test_a_unit_that_is_written_by_hand_casts_its_outputs() -> None:
    params = {"w": torch.ones(3)}
    plan = fs.make_plan(params, 1, precision=LOW)
    f = fs.unshard(lambda leaves, x: (leaves["w"] * x, leaves["w"].dtype), plan.units[""], fs.Mesh())
    out, inside = f(fs.shard(params, plan, fs.Mesh())[""], torch.ones(3))
    assert (out.dtype, inside) == (FP32, BF16)


def test_the_default_lets_an_input_of_higher_precision_raise_or_promote_and_cast_forward_inputs_rounds_it() -> None:
    """docs/precision.md says why a unit's inputs stay as they are by default."""
    angles = torch.tensor([[1.0 + 2**-12]])

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
            return x * self.scale + angles

    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self[0](x, angles)
            return out

    for cast, expected in ((False, (FP32, angles.item())), (True, (BF16, 1.0))):
        precision = fs.MixedPrecision(BF16, cast_forward_inputs=cast)
        (out,) = outputs_on(1, fs.make_functional(Model(Rotary())), torch.zeros(1, 1), ["0"], precision=precision)
        assert (out.dtype, out.item()) == expected


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
    names, outs = ["0", "2", "4"], []
    units = Units(names, {name: {"precision": OWN} for name in names} if everywhere else {})

    def program(model: Any, x: torch.Tensor) -> torch.Tensor:
        outs.append(model(x))
        return outs[-1].square().mean()

    call = sharded_call(mesh, fs.make_functional(net_of_three()), rows(mesh), units, program=program, precision=LOW)
    return outs[0].detach(), call.grads


def compare(mesh: fs.Mesh) -> None:
    for everywhere in (False, True):
        (out, grads), (their_out, their_grads) = ours(mesh, everywhere), theirs(mesh, everywhere)
        assert out.dtype == their_out.dtype == FP32
        same_bits((out, grads), (their_out, their_grads))


@pytest.mark.slow
def test_on_processes_outputs_and_gradients_are_those_of_fsdp2_to_the_bit() -> None:
    run_ranks(compare, 2)
