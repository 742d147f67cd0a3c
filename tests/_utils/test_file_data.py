"""Data of files is checked in a time that grows with the data alone."""

from __future__ import annotations

import json
import time

import pytest

from funcshard._utils import file_data


def test_a_key_twice_is_found_among_many_without_a_search_for_each() -> None:
    text = json.dumps({str(number): 0 for number in range(100_000)})[:-1] + ', "99999": 1}'
    before = time.process_time()
    with pytest.raises(ValueError, match="it has the key '99999' twice in one object"):
        file_data.parse(text)
    assert time.process_time() - before < 10  # a search for each key takes minutes
