"""Each possible pair of values meets in some row."""

from __future__ import annotations

import itertools

from tests.jobs import CHOICES, Job, covering, is_possible
from tests.pairwise import pairwise

THREE = {"a": range(4), "b": "xyz", "c": [None, True]}


def pairs_in(rows):
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def test_every_pair_of_values_meets_in_few_rows() -> None:
    rows = pairwise(THREE)
    assert pairs_in(rows) == pairs_in(dict(zip(THREE, values, strict=True)) for values in itertools.product(*THREE.values()))
    assert len(rows) <= 14  # of 24
    assert rows == pairwise(THREE)


def test_impossible_rows_are_left_out_and_all_other_pairs_meet() -> None:
    rows = pairwise(THREE, lambda row: row["a"] != 3 or row["c"] is None)
    assert all(row["a"] != 3 or row["c"] is None for row in rows)
    assert len(pairs_in(rows)) == 12 + 7 + 6


def test_jobs_hold_every_pair_of_options_that_is_possible() -> None:
    jobs = covering()
    assert len(jobs) < 60
    met = pairs_in(vars(job) for job in jobs)
    for one, two in itertools.combinations(CHOICES, 2):
        for a, b in itertools.product(CHOICES[one], CHOICES[two]):
            if is_possible(Job(**{one: a, two: b})):
                assert ((one, a), (two, b)) in met
