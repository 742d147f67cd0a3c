"""``MixedPrecision`` as a value, in plans and in overrides of units, and which inputs it casts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard.core import cast_inputs, run_in_full_precision
from funcshard.plan.precision import class_name

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def plan_of(precision: Any, units: Any = (), tree: Any = None, **options: Any) -> fs.Plan:
    return fs.make_plan(tree or {"a": torch.zeros(3), "b": torch.zeros(5)}, 2, units=units, precision=precision, **options)


def test_classes_are_kept_by_name_and_a_name_is_as_good():
    by_name = fs.MixedPrecision(ignored_classes=("torch.nn.modules.normalization.LayerNorm",))
    assert fs.MixedPrecision(ignored_classes=[nn.LayerNorm]) == by_name  # type: ignore[arg-type]
    assert class_name(nn.LayerNorm) == "torch.nn.modules.normalization.LayerNorm"


THREE = {name: torch.zeros(3) for name in "abc"}


def test_the_outputs_that_a_plan_casts_are_the_whole_models_and_a_unit_has_its_own():
    own = fs.MixedPrecision(BF16, output_dtype=FP64)
    plan = plan_of(fs.MixedPrecision(FP16, output_dtype=FP32), {"a": {}, "b": {"precision": own}}, THREE)
    assert plan.precision is not None
    assert [unit.precision and unit.precision.output_dtype for unit in plan.unit_list] == [FP32, None, FP64]
    outputs = [line.rpartition("outputs in ")[2].strip() for line in str(plan).splitlines() if "outputs" in line]
    assert outputs == ["float32", "float64"]


def test_each_unit_travels_in_its_own_precision():
    half, mixed = fs.MixedPrecision(FP16), fs.MixedPrecision(BF16, FP32)
    plan = plan_of(half, {"a": {"precision": None}, "b": {"precision": mixed}, "c": {}}, THREE | {"root": torch.zeros(1)})
    assert [plan.units[name].precision for name in ("", "a", "b", "c")] == [half, None, mixed, half]
    travelled = {(event.unit, event.kind, event.dtype) for event in fs.predict_events(plan)}
    dtypes = {"": ("float16", "float16"), "a": ("float32", "float32"), "b": ("bfloat16", "float32"), "c": ("float16",) * 2}
    kinds = ("all_gather", "reduce_scatter")
    assert travelled == {(unit, kind, dtype) for unit in dtypes for kind, dtype in zip(kinds, dtypes[unit], strict=True)}


def test_a_printed_plan_says_what_is_cast_in_text_and_html():
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    norm[2].requires_grad_(False)
    units = fs.wrap.by_function(lambda module: getattr(module, "out_features", 0) == 2)(norm)
    with pytest.warns(UserWarning, match="ignored_classes"):
        plan = fs.make_plan(fs.make_functional(norm)[1], 2, units=units, precision=fs.MixedPrecision(BF16, FP32))
    lines = {line.split()[0]: line for line in str(plan).splitlines()[3:]}
    assert lines["(root)"].endswith("full_shard, kept until backward, in bfloat16, reduced in float32")
    assert lines["1"].endswith("full_shard, full precision")
    assert lines["2"].endswith("full_shard, in bfloat16")  # frozen: nothing is reduced
    html = plan._repr_html_()
    assert html.count("in bfloat16") == 2
    assert html.count("full precision") == 1
    plain = str(plan.in_full_precision())
    assert "bfloat16" not in plain


F, I = torch.ones(2), torch.ones(2, dtype=torch.int64)  # noqa: E741
B, D = torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=FP64)


CASTS = {  # a precision, whether it is the root's, and whether inputs are cast
    "no precision": (None, True, False),
    "no param_dtype": (fs.MixedPrecision(reduce_dtype=FP16, cast_forward_inputs=True), True, False),
    "the root, by default": (fs.MixedPrecision(FP16), True, True),
    "a unit, by default": (fs.MixedPrecision(FP16), False, False),
    "a unit that asks for it": (fs.MixedPrecision(FP16, cast_forward_inputs=True), False, True),
    "a root that does not": (fs.MixedPrecision(FP16, cast_root_forward_inputs=False), True, False),
    "a root as a unit that asks for it": (
        fs.MixedPrecision(FP16, cast_forward_inputs=True, cast_root_forward_inputs=False), True, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("precision", "root", "cast"), CASTS.values(), ids=CASTS)
def test_two_flags_say_whose_inputs_are_cast(precision, root, cast):
    args, kwargs = (F, I), {"mask": B, "scale": D}
    new_args, new_kwargs = cast_inputs(precision, root, args, kwargs)
    dtypes = [FP16, torch.int64, torch.bool, FP16] if cast else [FP32, torch.int64, torch.bool, FP64]
    assert [x.dtype for x in (*new_args, *new_kwargs.values())] == dtypes
    assert cast or (new_args is args and new_kwargs is kwargs)


def test_a_full_precision_module_without_a_floating_point_input_returns_what_it_computes():
    assert run_in_full_precision([FP32], lambda ids: ids / 2, (I,), {}).dtype == FP32


WIDEST = {
    "of several": ([FP16, FP64, FP32], FP64),
    "beside integers": ([torch.int64, FP16], FP16),
    "of integers alone": ([torch.int64], FP32),
}


@pytest.mark.parametrize(("dtypes", "wanted"), WIDEST.values(), ids=WIDEST)
def test_full_precision_is_the_widest_floating_point_dtype_and_float32_without_one(dtypes, wanted):
    assert run_in_full_precision(dtypes, lambda x: x.new_tensor(x.element_size()), (F,), {}) == wanted.itemsize


class Exact(nn.Sequential):
    """Computes in full precision."""


def test_a_unit_inside_a_full_precision_module_has_no_precision_unless_it_asks_for_one() -> None:
    half = fs.MixedPrecision(param_dtype=torch.bfloat16, ignored_classes=(Exact,))
    _, params, _ = fs.make_functional(nn.Sequential(nn.Linear(2, 2), Exact(*(nn.Linear(2, 2) for _ in range(3)))))
    units = {"0": {}, "1": {}, "1.1": {}, "1.2": {"precision": half}}
    with pytest.warns(UserWarning, match="hold Exact"):
        plan = fs.make_plan(params, 2, units=units, precision=half)
    assert [plan.units[name].precision for name in units] == [half, None, None, half]
