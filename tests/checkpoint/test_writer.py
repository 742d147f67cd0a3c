"""What a save sends and lists does not grow with the ranks, and a checkpoint restores without a list of all boxes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.checkpoint import save_restore, writer

PARAMS = {"a": torch.arange(6.0), "b": torch.arange(4.0)}  # on two ranks, four boxes


def saved(mesh: fs.Mesh, path: Path) -> tuple[Any, Any]:
    """Return a state that was saved, and what comes back."""
    plan = fs.make_plan(PARAMS, mesh)
    state = {"shards": fs.shard(PARAMS, plan, mesh), "step": 7}
    fs.save(path, state, plan, mesh)
    return state, fs.restore(path, plan, mesh)


@pytest.mark.parametrize(("most", "listed"), [(4, True), (3, False)])
def test_a_checkpoint_of_many_boxes_has_no_list_of_them_for_dcp_and_restores_all_the_same(
    most: int, listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "MOST_LISTED", most)
    with caplog.at_level(logging.INFO, "funcshard"):
        pairs = fs.simulate(lambda mesh: saved(mesh, tmp_path / "step"), 2)
    for state, found in pairs:
        assert torch.equal(found["shards"][""]["float32"], state["shards"][""]["float32"])
        assert found["step"] == 7
    assert (tmp_path / "step" / ".metadata").exists() == listed
    assert fs.latest(tmp_path) == tmp_path / "step"
    words = f"checkpoint {tmp_path / 'step'} has no .metadata, because it would list more than 3 boxes"
    assert (words in caplog.messages) != listed


def test_ranks_that_agree_on_a_save_pass_equal_texts_of_which_none_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, passed = save_restore.all_gather_texts, set()

    def all_gather_texts(mesh: fs.Mesh, text: str) -> list[str]:
        passed.add((mesh.rank, text))
        return exchange(mesh, text)

    monkeypatch.setattr(save_restore, "all_gather_texts", all_gather_texts)
    fs.simulate(lambda mesh: saved(mesh, tmp_path / "step"), {"replicate": 2, "shard": 2})
    texts = [{text for rank, text in passed if rank == each} for each in range(4)]
    assert texts[0] == texts[1] == texts[2] == texts[3] != set()
