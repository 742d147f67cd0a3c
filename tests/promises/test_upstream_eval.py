"""PyTorch's tests of evaluation in full precision, on its transformer: loss, parameters and reduction."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.promises.test_upstream_core import CPU, theirs
from tests.ranks import run_ranks

FP16, FP32 = torch.float16, torch.float32
# Whether there are units, cast_forward_inputs, and full precision in evaluation.
SETTINGS = list(itertools.product((False, True), (False, True), (False, True)))
# Parameters stay in float32, so only the reduction differs; no module is ignored.
COMMUNICATION = {"param_dtype": FP32, "reduce_dtype": FP16, "buffer_dtype": FP32, "ignored_classes": ()}
COMPUTATION = {"param_dtype": FP16, "reduce_dtype": FP16, "buffer_dtype": FP16}


def evaluate(mesh: fs.Mesh, options: dict[str, Any]) -> dict[Any, Any]:
    """Return, for each setting, the dtypes of losses, gradients and data sent, in training and in evaluation."""
    warnings.filterwarnings("ignore", "the forward of .* changed buffers")  # of BatchNorm, which nothing here reads
    found = {}
    for units, cast, full in SETTINGS:
        model = theirs("TransformerWithSharedParams", mesh.rank, mesh.world_size).train()
        apply, params, buffers = fs.make_functional(model)
        layers = fs.wrap.by_class(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)(model) if units else []
        precision = fs.MixedPrecision(**options, cast_forward_inputs=cast, full_precision_in_eval=full)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ignored_classes of the precision hold BatchNorm1d: 'bn' become units")
            plan = fs.make_plan(params, mesh, units=layers, precision=precision)
        shards, batch = fs.shard(params, plan, mesh), model.get_input(CPU)
        for mode in ("train", "eval"):
            sharded = fs.fully_shard(getattr(apply, mode)(), plan, mesh)
            loss_fn = lambda s: model.get_loss(batch, sharded(s, buffers, *batch))  # noqa: E731, B023
            with fs.record_events() as events:
                loss, grads = fs.value_and_grad(loss_fn)(shards)
            gradients = {grad.dtype for unit in grads.values() for grad in unit.values()}
            travelled = {(event.kind, event.dtype) for event in events if event.unit != "bn"}
            found[units, cast, full, mode] = (loss.dtype, gradients, travelled)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "compute", "gathered", "reduced"),
    [(COMPUTATION, FP16, "float16", "float16"), (COMMUNICATION, FP32, "float32", "float16")],
    ids=["everything in float16", "the reduction alone"],
)
def test_a_transformer_evaluates_and_reduces_in_full_precision_where_it_should(options, compute, gathered, reduced):
    low = (compute, {FP32}, {("all_gather", gathered), ("reduce_scatter", reduced)})
    full = (FP32, {FP32}, {("all_gather", "float32"), ("reduce_scatter", "float32")})
    for found in run_ranks(evaluate, 2, options, timeout=120):
        assert len(found) == 2 * len(SETTINGS)
        for (_, _, asked, mode), dtypes in found.items():
            assert dtypes == (full if asked and mode == "eval" else low)
