"""Tables in which each two values of different arguments meet, in place of all combinations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

__all__ = ["crossed", "pairwise"]

Row = dict[str, Any]


def pairwise(choices: Mapping[str, Sequence[Any]], is_possible: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return rows in which each possible pair of two arguments' values occurs.

    Greedy and always the same: of some random rows around a pair that is missing, take the one that
    has most missing pairs.

    Arguments:
        choices: the values of each argument.
        is_possible: whether a row may be in the table; it gets rows of all arguments.
    """
    drawn, places = random.Random(0), {name: range(len(values)) for name, values in choices.items()}

    def rows_with(fixed: Mapping[str, int]) -> Iterator[dict[str, int]]:
        for _ in range(1000):
            row = {name: fixed.get(name, drawn.choice(place)) for name, place in places.items()}
            if is_possible({name: choices[name][at] for name, at in row.items()}):
                yield row

    missing = dict.fromkeys(
        ((one, a), (two, b))
        for one, two in itertools.combinations(choices, 2)
        for a, b in itertools.product(places[one], places[two])
    )
    table = []
    while missing:
        pair = next(iter(missing))
        rows = list(itertools.islice(rows_with(dict(pair)), 40))
        del missing[pair]
        if rows:  # else the pair is impossible
            best = max(rows, key=lambda row: sum(other in missing for other in itertools.combinations(row.items(), 2)))
            table.append({name: choices[name][at] for name, at in best.items()})
            for other in itertools.combinations(best.items(), 2):
                missing.pop(other, None)
    return table


def crossed(**choices: Sequence[Any] | Mapping[str, Any]) -> Any:
    """Return a mark that parametrizes a test over ``pairwise`` of its arguments' values.

    Arguments:
        choices: the values of each argument; a dictionary names them in the test's id.
    """
    values = {name: list(of.values() if isinstance(of, Mapping) else of) for name, of in choices.items()}
    shown = {name: list(of) for name, of in choices.items()}
    rows = pairwise({name: range(len(of)) for name, of in values.items()})
    cases = [
        pytest.param(
            *(values[name][at] for name, at in row.items()), id="-".join(str(shown[n][at]) for n, at in row.items())
        )
        for row in rows
    ]
    return pytest.mark.parametrize(list(choices), cases)
