"""Traced steps that tests only look at: passes leave their argument as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcshard as fs
from tests.graph.test_memory import made


@pytest.fixture(scope="session")
def full_shard() -> Any:
    """Return a traced step of four equal blocks on four ranks."""
    return fs.trace(*made(), torch.randn(16, 64))
