from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from funcshard.checkpoint import contents, save_restore


@pytest.fixture
def folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the checkpoints that a file of tests has ``saved``, which no reader may wait for."""
    for module in (contents, save_restore):  # they wait if another save replaces what they read
        monkeypatch.setattr(module, "pause", lambda attempt: pytest.fail("it waits for another save"))
    return Path(shutil.copytree(saved, tmp_path / "copy"))
