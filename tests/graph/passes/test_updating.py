"""update_early: gradients are free as soon as their unit is updated."""

from __future__ import annotations

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
@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"max_norm": 1.0}, "joins gradients of 'blocks.0', 'blocks.1', 'blocks.2' and 1 more", id="clipping"),
        pytest.param({"scaler": fs.GradScaler()}, "joins gradients of", id="scaler"),
    ],
)
def test_updates_that_depend_on_all_gradients_are_refused(options: dict[str, Any], words: str) -> None:
    traced = fs.trace(*made(step_options=options), torch.randn(16, 64))
    with pytest.raises(ValueError, match="depend on the gradients of their own unit alone") as raised:
        fs.passes.update_early(traced)
    assert words in str(raised.value)
