"""What PyTorch's test_dynamo_distributed.py asks of a sharding library, for traced steps and compiled units."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.graph.test_traced import same
from tests.graph.test_traced_models import check_traced, run
from tests.models import SUBJECTS
from tests.module.law import Runs
from tests.module.test_unit_setup_compiled import Checkpointed, Mutating, Shared

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # from Dynamo
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
]
WIDTH = 3
Tensor = torch.Tensor


def rows(*sizes: int) -> list[Tensor]:
    return [torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(k)) for k, size in enumerate(sizes)]


# --- guards and recompiles ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the forward of .* set attributes of the module")
@pytest.mark.parametrize("cls", [Mutating, Shared, Checkpointed])
def test_fifteen_steps_make_one_recording_of_a_module_that_does_more_than_compute(
    cls: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "funcshard.graph"):
        fs.simulate(lambda mesh: check_traced(mesh, rows(4) * 15, model=lambda _: cls(), mutable=True), 1)
    assert sum("records" in record.message for record in caplog.records) == 1


# --- ranks that differ ----------------------------------------------------------------------------

OWN_BATCHES: dict[str, tuple[list[Any], list[Any]]] = {
    "sizes": (rows(5, 8, 6), rows(6, 6, 3)),
    "a new size on one rank": (rows(4, 4), rows(4, 5)),
    "no data on one rank": (rows(4, 4), rows(3, 0)),
    "dims": (rows(4), [rows(4)[0][0]]),
    "types": (rows(4), [3]),
}


@pytest.mark.nightly(one_in=5)
@pytest.mark.parametrize("case", OWN_BATCHES)
def test_ranks_with_batches_of_other_shapes_record_their_own_and_communicate_alike(case: str) -> None:
    def weight(_: fs.Mesh, x: Any) -> float:
        return float(len(x)) if isinstance(x, Tensor) else 1.0

    def call(f: Any, x: Any) -> Any:
        return f(x if isinstance(x, Tensor) else torch.ones(x, WIDTH))

    def main(mesh: fs.Mesh) -> Any:
        model = lambda _: nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 2))  # noqa: E731
        batches = OWN_BATCHES[case][mesh.rank]
        return list(check_traced(mesh, batches, model=model, weight=weight, call=call).events)

    first, second = fs.simulate(main, 2)
    assert first == second


@pytest.mark.slow
def test_ranks_whose_graphs_communicate_differently_raise_and_name_the_ranks() -> None:
    def main(mesh: fs.Mesh) -> None:
        extra = lambda out, x: out.mean() + (fs.psum(out.mean(), mesh) if mesh.rank else 0)  # noqa: E731
        run(mesh, rows(4), traced=True, model=lambda _: nn.Linear(WIDTH, 2), loss=extra)

    words = "ranks issue different collectives: .* reduce_scatter .* on rank 0 and all_reduce .* on rank 1"
    with pytest.raises(RuntimeError, match=words):
        fs.simulate(main, 2)


@pytest.mark.slow
def test_a_rank_that_records_slowly_does_not_fail_the_others() -> None:
    def main(mesh: fs.Mesh) -> Any:
        def slowly(out: Tensor, x: Tensor) -> Tensor:
            time.sleep(0.2 * (mesh.rank == 0))  # Python runs while the step is recorded, and not later
            return out.square().mean()

        return run(mesh, rows(4, 4), traced=True, model=lambda _: nn.Linear(WIDTH, 2), loss=slowly)[:2]

    first, second = fs.simulate(main, 2)
    assert same(first[0], second[0])


# --- boundaries of groups -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "split"), [(1 << 20, [4]), (200, [2, 2])])
def test_groups_split_a_step_where_the_plan_says(limit: int, split: list[int]) -> None:
    """Each of four layers has 80 bytes; a group is one gather and one reduction, as in DDP's splits."""

    def main(mesh: fs.Mesh) -> None:
        model = lambda _: nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])  # noqa: E731
        plan = {"units": ["0", "1", "2", "3"], "bucket_bytes": limit, "strategy": "shard_grad_op"}
        events = check_traced(mesh, [torch.ones(2, 4)], model=model, plan=plan).events
        assert [event.bytes // 80 for event in events if event.kind == "all_gather"] == split
        assert [event.bytes // 80 for event in events if event.kind == "reduce_scatter"] == split[::-1]

    fs.simulate(main, 2)


# --- what models do -------------------------------------------------------------------------------


def attention(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Call forward of a module itself, draw noise, and choose between numbers."""
    x = net.norm(x + y)
    x, _ = net.attention.forward(x, x, x)
    return x + torch.where(x < 0.5, 0.3, 0.6) + torch.randn(4) * torch.rand(4)


@pytest.mark.slow
def test_forward_in_contexts_that_calls_forward_and_draws_numbers() -> None:
    def call(f: Any, x: Tensor) -> Any:
        with torch.no_grad(), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            return f(x, x)

    def model(_: fs.Mesh) -> nn.Module:
        return Runs(attention, norm=nn.LayerNorm(4), attention=nn.MultiheadAttention(4, 2, batch_first=True))

    batches = [torch.ones(2, 3, 4), torch.ones(2, 3, 4) / 2]
    fs.simulate(lambda mesh: check_traced(mesh, batches, model=model, call=call), 1)


@pytest.mark.nightly
def test_bert_traced_with_gradient_checkpointing() -> None:
    subject = SUBJECTS["bert"]

    def model(_: fs.Mesh) -> nn.Module:
        module: Any = subject.build(0.0)
        module.gradient_checkpointing_enable({"use_reentrant": False})
        found: nn.Module = module
        return found

    def main(mesh: fs.Mesh) -> None:
        batches = [subject.make_batch(2, k) for k in range(2)]
        call = lambda f, batch: f(**batch["inputs"])  # noqa: E731
        units = {"units": list(subject.units)}
        # Why warm: the first backward teaches that checkpoints inside units need their leaves.
        check_traced(mesh, batches, warm=True, model=model, loss=subject.loss, call=call, plan=units)

    fs.simulate(main, 2)
