"""PyTorch's tests of the inputs of modules with different precision: its models, unchanged, and its answers."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.module.law import Runs
from tests.promises.test_upstream_core import STRATEGIES
from tests.ranks import run_ranks, run_simulated

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
EXPLICIT = fs.MixedPrecision(FP16, cast_forward_inputs=True)
IMPLICIT = fs.MixedPrecision(FP16)
FULL = fs.MixedPrecision(FP32, cast_forward_inputs=True)


class Seen(dict):
    """The dtypes that modules saw, by module; ``deepcopy`` of a module keeps the same dictionary."""

    def __deepcopy__(self, memo: Any) -> Seen:
        return self


def overridden(module: nn.Module, paths: dict[str, Any]) -> Any:
    """Return the units at ``paths``, each with its own precision."""
    modules = {module.get_submodule(path): {"precision": precision} for path, precision in paths.items()}
    return fs.wrap.by_function(lambda each: modules.get(each, False))(module)


CASES = {
    "float16 on one submodule": (False, None, {"c2": EXPLICIT}, [FP32, FP32, FP16]),
    "float16 on one submodule, which casts its input itself": (True, None, {"c2": IMPLICIT}, [FP32, FP32, FP32]),
    "float16 on one submodule, and nobody casts": (False, None, {"c2": IMPLICIT}, None),
    "the second in float16 in a root of float32": (False, FULL, {"c2": EXPLICIT}, [FP32, FP32, FP16]),
    "the first in float16 in a root of float32": (False, FULL, {"c1": EXPLICIT}, None),
}  # whether the model casts, the precision of the root and of units, and the dtypes that modules see; none if torch raises


def run_all_theirs(mesh: fs.Mesh) -> None:
    """Compare the dtypes that PyTorch's model and its two halves see."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing torch's test tools warns
        model_class = importlib.import_module("torch.testing._internal.common_distributed").SaveForwardInputsModel
    for name, (cast, root, units, dtypes) in CASES.items():
        seen = Seen()
        model = model_class(seen, cast_forward_inputs=cast)
        apply, params, buffers = fs.make_functional(model)
        plan = fs.make_plan(params, mesh, units=overridden(model, units), precision=root)
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        evaluate = fs.value_and_grad(lambda s, f=sharded, b=buffers: f(s, b, torch.zeros(2, 100)).sum())
        if dtypes is None:
            with pytest.raises(RuntimeError, match="must have the same dtype"):
                evaluate(shards)
        else:
            _, grads = evaluate(shards)
            assert {grad.dtype for unit in grads.values() for grad in unit.values()} == {FP32}, name
            assert [x.dtype for x in seen.values()] == dtypes, name


def test_submodules_of_different_precision_see_what_pytorch_gives_them():
    run_ranks(run_all_theirs, 2, timeout=120)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(("asked", "second_y"), [(False, FP32), (True, None)], ids=["as it is", "cast by request"])
def test_what_a_model_makes_itself_is_no_input_of_it(dtype, asked, second_y):
    def main(mesh: fs.Mesh) -> None:
        seen: dict[str, torch.dtype] = {}

        def second(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.update({"second x": x.dtype, "second y": y.dtype})
            return net.l(x)

        def whole(net: Any, x: torch.Tensor) -> torch.Tensor:
            seen["model"] = x.dtype
            return net.l2(net.l1(x), torch.ones(2, 10))

        model = Runs(whole, l1=nn.Linear(10, 10), l2=Runs(second, l=nn.Linear(10, 10)))
        apply, params, buffers = fs.make_functional(model)
        units = overridden(model, {"l2": fs.MixedPrecision(dtype, cast_forward_inputs=asked)})
        plan = fs.make_plan(params, mesh, units=units, precision=fs.MixedPrecision(dtype))
        fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), buffers, torch.zeros(2, 10))
        assert seen == {"model": dtype, "second x": dtype, "second y": second_y or dtype}

    run_simulated(main, 2)


def input_gradient(mesh: fs.Mesh, strategy: str, precision: fs.MixedPrecision) -> None:
    net = nn.Linear(16, 16, bias=False)
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, strategy=strategy, precision=precision)
    sharded = fs.fully_shard(apply, plan, mesh)
    x = torch.randn(4, 16, requires_grad=True)
    out = sharded(fs.shard(params, plan, mesh), buffers, x)
    assert out.dtype == precision.param_dtype
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == FP32
    expected = torch.ones(4, 16, dtype=out.dtype) @ params["weight"].to(out.dtype)
    assert torch.equal(x.grad, expected.float())


@pytest.mark.parametrize("precision", [fs.MixedPrecision(FP16, FP32, FP32), fs.MixedPrecision(BF16)], ids=["fp16", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_input_gets_its_gradient_in_its_own_dtype(strategy, precision):
    for world_size in (1, 2):
        run_simulated(input_gradient, world_size, strategy, precision)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_module_that_is_left_out_of_low_precision_raises_torchs_own_error(dtype):
    net = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 10)), nn.Linear(10, 10))
    apply, params, buffers = fs.make_functional(net)

    def run(mesh: fs.Mesh, left_out: fs.MixedPrecision | None) -> None:
        units = overridden(net, {"1": left_out})
        plan = fs.make_plan(params, mesh, units=units, precision=fs.MixedPrecision(dtype))
        fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), buffers, torch.ones(2, 10)).sum().backward()

    with pytest.raises(RuntimeError, match="must have the same dtype"):
        run_simulated(run, 1, None)
    with pytest.raises(RuntimeError, match="must have the same dtype"):  # the precision casts inputs, not outputs
        run_simulated(run, 1, fs.MixedPrecision(FP32, cast_forward_inputs=True))
