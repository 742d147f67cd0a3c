"""A compiled step does what the step does; equal regions are compiled once."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import funcshard as fs
from funcshard._utils.torch_operators import operator_name
from funcshard.graph import Traced
from funcshard.graph.compiling import Cut, Region, region_text
from tests.graph import linear
from tests.graph.test_memory import residual
from tests.graph.test_traced import CASES, batch_of, made, same, steps
from tests.ranks import Pool, on_ranks

SIZES = (4, 4)
TWO = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
NO_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs the C++ compiler g++")
BITS = ["weights, scaler, mutable", "remat, dropout", "offload, foreach, not donated"]


def compiled(mesh: fs.Mesh, backend: Any, **options: Any) -> tuple[Traced, fs.TrainState]:
    step, state = made(mesh, **options)
    return fs.trace(step, state, batch_of(mesh, 0)).compile(backend=backend), state


def schedule(traced: Traced, state: Any, batch: Any) -> Any:
    """Return the nodes that a compiled step runs."""
    return traced.graph_for(state, batch)[0].run.__self__.graph.nodes


# Sums in the order of an index, with operators that say so in their names alone.
SUMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scatter_add_": lambda x, index: x.clone().scatter_add_(0, index, x),
    "scatter_reduce": lambda x, index: x.scatter_reduce(0, index, x, "sum"),
    "scatter_reduce_": lambda x, index: x.clone().scatter_reduce_(0, index, x, "sum"),
    "index_add": lambda x, index: x.index_add(0, index, x),
    "index_reduce": lambda x, index: x.index_reduce(0, index, x, "mean"),
    "index_put_": lambda x, index: x.clone().index_put_((index,), x, accumulate=True),
    "_index_put_impl_": lambda x, index: torch.ops.aten._index_put_impl_(x.clone(), [index], x, True),
    "_unsafe_index_put": lambda x, index: torch.ops.aten._unsafe_index_put(x, [index], x, True),
}


@pytest.mark.parametrize("name", SUMS)
def test_no_compiler_gets_a_sum_in_the_order_of_an_index(name: str) -> None:
    graph = make_fx(SUMS[name], tracing_mode="fake")(torch.ones(4), torch.zeros(4, dtype=torch.long)).graph
    alone = [operator_name(step.target) for step in Cut(graph).steps if isinstance(step, torch.fx.Node)]
    assert f"aten::{name}" in alone


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("case", BITS)
def test_regions_that_run_as_they_are_give_the_bits_and_the_collectives_of_the_step(case: str) -> None:
    ranks, options = CASES[case]

    def main(mesh: fs.Mesh) -> None:
        eager, found = made(mesh, **options), compiled(mesh, "eager", **options)
        assert same(steps(mesh, *found, SIZES), steps(mesh, *eager, SIZES))

    fs.simulate(main, ranks)


def deep(mesh: fs.Mesh, layers: int) -> tuple[Any, fs.TrainState, torch.Tensor]:
    module = residual(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(layers)))
    options: Any = {"module": module, "units": ["blocks.*"], "momentum": 0.9, "donate": False}
    return *linear.made(mesh, linear.squares, **options), torch.ones(2, 4)


def counting(compile_calls: list[int]) -> Callable[..., Any]:
    def backend(module: torch.fx.GraphModule, like: list[torch.Tensor]) -> Any:
        compile_calls.append(len(like))
        return module.forward

    return backend


def test_a_result_in_out_is_read_by_later_regions() -> None:
    def loss(f: Any, x: torch.Tensor) -> torch.Tensor:
        scale = torch.mul(x, 3.0, out=torch.empty_like(x))
        return (f(x) * scale + scale.exp()).square().mean()

    step, state = linear.made(fs.Mesh(), loss, module=TWO, units=["0", "1"], donate=False)
    compiled = fs.trace(step, state, torch.rand(2, 3)).compile(backend="eager")
    batch = torch.rand(2, 3)
    assert same(compiled(state, batch), step(state, batch))


@on_ranks(2)
def test_a_model_without_units_is_one_region_and_its_update_another(mesh: fs.Mesh) -> None:
    traced = fs.trace(*linear.made(mesh, linear.squares, module=TWO, donate=False), torch.rand(2, 3))
    assert sum(isinstance(region, Region) for region in Cut(traced.graph.graph).steps) == 2


def test_regions_whose_inputs_differ_are_compiled_apart() -> None:
    x = torch.zeros(2, 3)
    inputs = [x, x.t(), torch.zeros(3, 2), x.double(), torch.zeros(4, 3)[2:], torch.zeros(3)]
    texts = [region_text(make_fx(torch.sin, tracing_mode="fake")(each).graph) for each in inputs]
    assert len({*texts}) == len(texts)
    assert region_text(make_fx(torch.sin, tracing_mode="fake")(x + 1).graph) == texts[0]


@pytest.mark.nightly
@on_ranks(2)
def test_equal_blocks_are_compiled_once_and_later_recordings_too(mesh: fs.Mesh) -> None:
    for layers in (3, 5):
        calls: list[int] = []
        step, state, batch = deep(mesh, layers)
        traced = fs.trace(step, state, batch).compile(backend=counting(calls))
        state, _ = traced(state, batch)
        assert len(calls) == 6
        traced(state, torch.ones(3, 4))
        assert len(calls) > 6, "a recording with other shapes is compiled, too"


@pytest.mark.slow
@on_ranks(1)
def test_gathered_and_temporary_tensors_are_freed_at_their_last_use(mesh: fs.Mesh) -> None:
    traced, state = compiled(mesh, "eager")
    nodes = schedule(traced, state, batch_of(mesh, 0))
    regions = [node for node in nodes if getattr(node.target, "__name__", "") == "region"]
    assert regions
    for node in regions:
        (box,) = node.args
        boxed = [torch.ones(each.meta["val"].shape, dtype=each.meta["val"].dtype) for each in box.args]
        node.target(boxed)
        assert boxed == [], "a region empties the list, so that it may free its inputs early"


def _compare_and_count(mesh: fs.Mesh, cache: Path) -> tuple[int, int, list[float]]:
    """Train with the step, and twice with Inductor.

    Returns:
        How many graphs Inductor compiled, how many it found in ``cache``, and the step's first losses.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    from torch._dynamo.utils import counters

    def main(mesh: fs.Mesh) -> list[float]:
        found = []
        for backend in (None, "inductor", "inductor"):
            torch.manual_seed(0)
            step, state, batch = deep(mesh, 1)
            take = step if backend is None else fs.trace(step, state, batch).compile(backend=backend)
            losses = []
            for number in range(3):
                state, metrics = take(state, batch + mesh.rank + number)
                losses.append(metrics["loss"].clone())
            leaves = torch.utils._pytree.tree_leaves((state.shards, state.opt_state))
            found.append([*losses, *[torch.as_tensor(leaf) for leaf in leaves]])
        eager, first, second = found
        for step, one, other in zip(eager, first, second, strict=True):
            assert torch.equal(one, other), "bits from run to run"
            torch.testing.assert_close(one, step, rtol=1e-5, atol=1e-6)
        return [float(each) for each in first[:3]]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own imports warn
        losses, others = fs.simulate(main, 2)
    assert losses == others
    return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"], losses


@pytest.mark.nightly
@NO_COMPILER
def test_inductor_is_close_to_the_step_and_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    def process() -> Any:
        with contextlib.closing(Pool()) as pool:
            return pool.run(_compare_and_count, 1, tmp_path, timeout=240)[0]

    (cold, _, losses), (warm, hits, again) = process(), process()
    assert cold > 0
    assert warm == 0
    assert hits > 0
    assert losses == again, "bits from process to process"
