"""PyTorch's tests of the inputs of modules with different precision: its models, unchanged, and its answers."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.promises.test_upstream_core import CPU, theirs
from tests.ranks import run_ranks, run_simulated

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
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


def run_theirs(mesh: fs.Mesh, cast: bool, root: Any, units: dict[str, Any]) -> list[torch.dtype] | str:
    """Return the dtypes that PyTorch's model and its two halves saw, or the error that they raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing torch's test tools warns
        model_class = importlib.import_module("torch.testing._internal.common_distributed").SaveForwardInputsModel
    seen = Seen()
    model = model_class(seen, cast_forward_inputs=cast)
    apply, params, buffers = fs.make_functional(model)
    plan = fs.make_plan(params, mesh, units=overridden(model, units), precision=root)
    sharded = fs.fully_shard(apply, plan, mesh)
    shards = fs.shard(params, plan, mesh)
    try:
        _, grads = fs.value_and_grad(lambda s: sharded(s, buffers, torch.zeros(2, 100)).sum())(shards)
    except RuntimeError as error:
        return str(error)
    assert {grad.dtype for unit in grads.values() for grad in unit.values()} == {FP32}
    return [x.dtype for x in seen.values()]


CASES = {
    "float16 on one submodule": (False, None, {"c2": EXPLICIT}, [FP32, FP32, FP16]),
    "float16 on one submodule, which casts its input itself": (True, None, {"c2": IMPLICIT}, [FP32, FP32, FP32]),
    "float16 on one submodule, and nobody casts": (False, None, {"c2": IMPLICIT}, "same dtype"),
    "the second in float16 in a root of float32": (False, FULL, {"c2": EXPLICIT}, [FP32, FP32, FP16]),
    "the first in float16 in a root of float32": (False, FULL, {"c1": EXPLICIT}, "same dtype"),
}


def run_all_theirs(mesh: fs.Mesh) -> dict[str, Any]:
    return {name: run_theirs(mesh, *case[:3]) for name, case in CASES.items()}


def test_submodules_of_different_precision_see_what_pytorch_gives_them():
    for found in run_ranks(run_all_theirs, 2, timeout=120):
        for name, (*_, expected) in CASES.items():
            if isinstance(expected, str):
                assert "must have the same dtype" in found[name], name
            else:
                assert found[name] == expected, name


class Second(nn.Module):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.l, self.seen = nn.Linear(10, 10), seen

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen |= {"second x": x.dtype, "second y": y.dtype}
        return self.l(x)


class Both(nn.Module):
    """A model that creates one of the inputs of its submodule itself."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.l1, self.l2, self.seen = nn.Linear(10, 10), Second(seen), seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["model"] = x.dtype
        return self.l2(self.l1(x), torch.ones(2, 10))


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(("asked", "second_y"), [(False, FP32), (True, None)], ids=["as it is", "cast by request"])
def test_what_a_model_makes_itself_is_no_input_of_it(dtype, asked, second_y):
    def main(mesh: fs.Mesh) -> None:
        seen = Seen()
        model = Both(seen)
        apply, params, buffers = fs.make_functional(model)
        precision = fs.MixedPrecision(dtype)
        units = overridden(model, {"l2": fs.MixedPrecision(dtype, cast_forward_inputs=asked)})
        plan = fs.make_plan(params, mesh, units=units, precision=precision)
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


# --- embedding tables, whose inputs are integers ---------------------------------------------------------------------------

EMBEDDED = {
    "reduction": fs.MixedPrecision(reduce_dtype=FP16),
    "parameters and buffers": fs.MixedPrecision(FP16, buffer_dtype=FP16),
    "all": fs.MixedPrecision(FP16, FP16, FP16),
    "parameters, and reduction in float32": fs.MixedPrecision(FP16, FP32, FP16),
    "all in bfloat16": fs.MixedPrecision(BF16, BF16, BF16),
}


def train_embedded(mesh: fs.Mesh, units: bool) -> dict[str, Any]:
    """Train PyTorch's transformer, with dropout and BatchNorm, for six steps; return dtypes of losses and data sent."""
    warnings.filterwarnings("ignore", "the forward of .* changed buffers")  # of BatchNorm, which nothing here reads
    found = {}
    for name, precision in EMBEDDED.items():
        model = theirs("TransformerWithSharedParams", mesh.rank, mesh.world_size).train()
        apply, params, buffers = fs.make_functional(model)
        layers = fs.wrap.by_class(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)(model) if units else []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            plan = fs.make_plan(params, mesh, units=layers, precision=precision)
        sharded = fs.fully_shard(apply, plan, mesh)
        losses: list[torch.Tensor] = []

        def loss_fn(shards, buffers, batch, model=model, sharded=sharded, losses=losses):
            losses.append(model.get_loss(batch, sharded(shards, buffers, *batch)))
            return losses[-1]

        step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.01), plan, mesh)
        state = step.init(fs.shard(params, plan, mesh), buffers)
        travelled = set()
        for _ in range(6):
            with fs.record_events() as events:
                state, _ = step(state, model.get_input(CPU))
            travelled |= {(event.unit == "bn", event.kind, event.dtype) for event in events if event.unit is not None}
        found[name] = {
            "full": [unit.name for unit in plan.unit_list if unit.full_precision],
            "said": [str(each.message) for each in said],
            "losses": {loss.dtype for loss in losses}, "finite": all(loss.isfinite() for loss in losses),
            "fell": bool(losses[-1] < losses[0]), "travelled": travelled,
        }  # fmt: skip
    return found


@pytest.mark.slow
@pytest.mark.parametrize("units", [False, True], ids=["one unit", "layers"])
def test_embedding_tables_take_integers_and_train_in_every_precision(units):
    for runs in run_ranks(train_embedded, 2, units, timeout=120):
        for name, precision in EMBEDDED.items():
            found, compute = runs[name], precision.param_dtype or FP32
            assert found["losses"] == {compute}, name
            assert found["finite"], name
            assert found["fell"], name
            assert found["full"] == ["bn"], name
            assert "BatchNorm1d: 'bn' become units of their own" in found["said"][0], name
            gathered, reduced = (str(dtype).removeprefix("torch.") for dtype in (compute, precision.reduce_dtype or compute))
            assert found["travelled"] == {
                (False, "all_gather", gathered), (False, "reduce_scatter", reduced),
                (True, "all_gather", "float32"), (True, "reduce_scatter", "float32"),
            }, name  # fmt: skip
