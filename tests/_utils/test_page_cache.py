"""Whether the page cache holds a part of a file is known, or said to be not so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from funcshard._utils import is_cached, page_cache

PAGE = 4096


@pytest.fixture
def file(tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(5 * PAGE + 1))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_what_was_just_written_is_in_the_cache(file: int) -> None:
    assert is_cached(file, 0, 5 * PAGE + 1)
    assert is_cached(file, PAGE, 2 * PAGE)


@pytest.mark.parametrize("part", [(0, 6 * PAGE + 1), (7 * PAGE, 8 * PAGE)], ids=["too long", "after the end"])
def test_what_a_file_does_not_have_is_not_in_the_cache(file: int, part: tuple[int, int]) -> None:
    assert not is_cached(file, *part)


def test_what_cannot_be_mapped_or_asked_is_said_to_be_elsewhere(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    assert not is_cached(read, 0, PAGE)
    os.close(read), os.close(write)
    monkeypatch.setattr(page_cache, "_mincore", lambda: None)
    assert not is_cached(file, 0, PAGE)
