"""update_early: gradients are free as soon as their unit is updated."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.graph.test_memory import made


def test_gradients_do_not_add_up(full_shard: Any) -> None:
    early = fs.passes.update_early(full_shard)
    assert early.events == full_shard.events
    text = str(early)
    first = text.index("_fused_adamw_")
    assert text.count("_fused_adamw_") == 4, "the optimizer's operation on a list is split"
    assert first < text.index("→ reduce-scatter blocks.2"), "and runs as soon as the gradient is there"
    # The gradients of three blocks, each a quarter on this rank, are gone when the fourth is there.


@pytest.mark.nightly
def test_updates_move_when_the_norm_is_only_measured() -> None:
    traced = fs.trace(*made(step_options={"max_norm": math.inf}), torch.randn(16, 64))
    text = str(fs.passes.update_early(traced))
    assert text.index("_fused_adamw_") < text.index("→ reduce-scatter blocks.2")
