"""gather_again: a step of the strategy shard_grad_op becomes one of full_shard."""

from __future__ import annotations

from typing import Any

import pytest

import funcshard as fs
from tests.graph.passes.test_keeping import UNIT, gathers


def test_shard_grad_op_becomes_full_shard(full_shard: Any, shard_grad_op: Any) -> None:
    freed = fs.passes.gather_again(shard_grad_op)
    assert shard_grad_op.events != full_shard.events
    assert freed.events == full_shard.events
    assert shard_grad_op.memory().peak_gathered == 4 * UNIT
    assert freed.memory().peak_gathered == full_shard.memory().peak_gathered == 2 * UNIT


def test_only_named_units_are_freed(shard_grad_op: Any) -> None:
    freed = fs.passes.gather_again(shard_grad_op, units=["blocks.1", "blocks.0"])
    assert gathers(freed)[4:] == ["blocks.1", "blocks.0"]
    assert freed.memory().peak_gathered == 2 * UNIT


def test_an_unknown_unit_is_named_with_one_that_is_like_it(shard_grad_op: Any) -> None:
    with pytest.raises(ValueError, match=r"found 'block\.1': did you mean 'blocks\.1'\?"):
        fs.passes.gather_again(shard_grad_op, units=["block.1"])


@pytest.mark.slow
def test_units_of_a_bucket_are_gathered_again_one_by_one(shard_grad_op: Any) -> None:
    joined = fs.passes.bucket(shard_grad_op, bucket_bytes=2 * UNIT)
    assert gathers(joined) == ["blocks.0 + blocks.1", "blocks.2 + blocks.3"]
    freed = fs.passes.gather_again(joined)
    assert gathers(freed)[2:] == ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]
