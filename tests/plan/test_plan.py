"""The plan as data: exact JSON, hashing, fingerprints, and the printed tables in text and HTML."""

import xml.etree.ElementTree

import pytest
import torch

import funcshard as fs
from funcshard.plan import fold_units


def example_params() -> dict:
    return {
        "blocks": [{"w": torch.zeros(4, 4), "b": torch.zeros(3)} for _ in range(2)],
        "head": {"w": torch.zeros(4, 2, dtype=torch.bfloat16)},
        "steps": torch.zeros((), dtype=torch.int64),
    }


def example_plan() -> fs.Plan:
    return fs.make_plan(example_params(), {"replicate": 2, "shard": 4}, units=["blocks.*"])


shared = torch.zeros(3, 5)
MIXED = fs.MixedPrecision(
    torch.float16, torch.float32, torch.bfloat16, keep_low_precision_grads=True, cast_forward_inputs=True,
    cast_root_forward_inputs=False, ignored_classes=("elsewhere.Norm",), full_precision_in_eval=True,
    output_dtype=torch.float32, divide_before_reduce=True,
)  # fmt: skip
PLANS = {
    "nested": example_plan(),
    "no units": fs.make_plan(example_params(), 3),
    "one rank": fs.make_plan(example_params(), 1, units=["blocks.0"]),
    "no_shard": fs.make_plan(example_params(), 2, strategy="no_shard", units=["head"]),
    "shard_grad_op": fs.make_plan(example_params(), 2, strategy="shard_grad_op", units=["head"]),
    "flat names": fs.make_plan({"a.w": torch.zeros(2), "a.b": torch.zeros(1), "c": torch.zeros(0)}, 2, units=["a"]),
    "tied": fs.make_plan({"a": shared, "b": {"c": shared}}, 2),
    "tuples and None": fs.make_plan((torch.zeros(2), None, [torch.zeros(3)]), 2, units=["2"]),
    "a leaf": fs.make_plan(torch.zeros(3), 2),
    "frozen": fs.make_plan({"a": torch.zeros(2, requires_grad=True), "b": torch.zeros(2)}, 2),
    "unicode": fs.make_plan({"größe": torch.zeros(2)}, 2),
    "empty": fs.make_plan({}, 2),
    "offload": fs.make_plan(example_params(), 2, units=["head"], offload=True),
    "precision": fs.make_plan(example_params(), 2, units=["head"], precision=fs.MixedPrecision(torch.bfloat16)),
    "each field of a precision": fs.make_plan(example_params(), 2, precision=MIXED),
    "a group": fs.make_plan(example_params(), 2, units=[["blocks.0", "head"]]),
    "a group of small units": fs.make_plan(example_params(), 2, units=["blocks.*"], bucket_bytes=1 << 20),
    "slices": fs.make_plan(example_params(), 4, units=["blocks.*"], reshard_after_forward=2),
    "kept over micro-batches": fs.make_plan(
        example_params(), 2, strategy="shard_grad_op", units={"": {"reshard_after_backward": False}}
    ),
    "cut along an axis": fs.make_plan(example_params(), {"shard": 2, "tensor": 2}, local={"head.w": {"tensor": 1}}),
}


# Why literals: plans are compared across processes and versions, so a change must be noticed.
FINGERPRINTS = {
    "nested": "ebbc0a0580dbe0f1", "no units": "893fa5caf54331f9", "one rank": "d0b55294ee0b5e70",
    "no_shard": "6eece7129bbc8918", "shard_grad_op": "d9e1fda02a6856a8", "flat names": "ec116e058c136f28",
    "tied": "936e593efcdf07e5", "tuples and None": "24a96f5dc04285ed", "a leaf": "da084ae0dcff0eb1",
    "frozen": "9d95d5df7395527e", "unicode": "c904b9c680673c3b", "empty": "fa414d62af1ddd5e",
    "offload": "1122775370da04d6", "precision": "cf35b6f9a3155e84", "each field of a precision": "ff42544e8e36a59e",
    "a group": "67c32a29b9cdf5dd", "a group of small units": "d12cc15ef2f99288", "slices": "432a6b2f6e130ea3",
    "kept over micro-batches": "cbf551b74c9acc57", "cut along an axis": "e52c9412d9dc783d",
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_json_is_an_exact_round_trip(plan: fs.Plan) -> None:
    again = fs.Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()
    assert again.fingerprint() == plan.fingerprint()
    assert str(again) == str(plan)
    assert plan.to_json().isascii()


def test_known_plans_have_the_fingerprints_that_were_written_down() -> None:
    assert {name: plan.fingerprint() for name, plan in PLANS.items()} == FINGERPRINTS
    assert len({*FINGERPRINTS.values()}) == len({*PLANS.values()}) == len(PLANS)


def test_the_table_shows_every_unit_buffer_and_the_total() -> None:
    params = {"blocks": [{"w": torch.zeros(100, 21)}], "head": torch.zeros(3, dtype=torch.float64)}
    plan = fs.make_plan(params, 2, units=["blocks.0"])
    assert str(plan) == repr(plan)
    expected = f"""\
Plan {plan.fingerprint()} for 2 ranks
───────────────────────────────────────────────────────────────────────────────────────
unit      buffer   leaves  numel  padding  bytes a rank  strategy
───────────────────────────────────────────────────────────────────────────────────────
(root)    float64       1      3        1          16 B  full_shard, kept until backward
blocks.0  float32       1  2,100        0       4.1 KiB  full_shard
───────────────────────────────────────────────────────────────────────────────────────
total                   2  2,103        1       4.1 KiB"""
    assert str(plan).splitlines()[2] == expected.splitlines()[2]
    ruled = [line for line in str(plan).splitlines() if set(line) != {"─"}]
    assert ruled == [line for line in expected.splitlines() if set(line) != {"─"}]


def test_the_table_of_a_hybrid_mesh_says_so() -> None:
    assert "for 8 ranks = 2 replicate × 4 shard" in str(example_plan())
    assert "for 1 rank\n" in str(PLANS["one rank"])


def cells(markup: str) -> list[list[str]]:
    """Return the text of each cell of an HTML table, which is checked to be well-formed, by row."""
    rows = xml.etree.ElementTree.fromstring(markup.replace("&nbsp;", " ")).iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_html_table_is_well_formed_and_says_what_the_text_says(plan: fs.Plan) -> None:
    rows, folded = cells(plan._repr_html_()), fold_units(plan.unit_list)
    assert rows[0] == ["unit", "buffer", "leaves", "numel", "padding", "bytes a rank", "strategy"]
    assert len(rows) == 2 + sum(len(group.first.buffers) for group in folded)
    two_equal_blocks = plan in (PLANS["nested"], PLANS["slices"])
    assert len(folded) == len(plan.unit_list) - two_equal_blocks
    assert all(cell in str(plan) for row in rows for cell in row)
