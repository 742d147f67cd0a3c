"""Each possible pair of values meets in some row."""

from __future__ import annotations

import itertools

from tests.jobs import CHOICES, Job, covering, is_possible


def pairs_in(rows):
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def test_jobs_hold_every_pair_of_options_that_is_possible() -> None:
    jobs = covering()
    assert len(jobs) < 60
    met = pairs_in(vars(job) for job in jobs)
    for one, two in itertools.combinations(CHOICES, 2):
        for a, b in itertools.product(CHOICES[one], CHOICES[two]):
            if is_possible(Job(**{one: a, two: b})):
                assert ((one, a), (two, b)) in met
