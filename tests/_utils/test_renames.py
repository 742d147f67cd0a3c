"""Two folders exchange their names in one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from funcshard._utils import exchange, renames


def test_two_folders_exchange_their_names(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of {name}").touch()
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system cannot exchange two names")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["of b"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["of a"]
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*/a' -> '.*/none'"):
        exchange(tmp_path / "a", tmp_path / "none")


def test_a_system_without_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renames, "_renameat2", lambda: None)
    assert not exchange(tmp_path / "a", tmp_path / "b")
