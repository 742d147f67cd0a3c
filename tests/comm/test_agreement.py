"""Texts of arguments that ranks compare: the same in every process, and no alarm about lambdas."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.comm.agreement import check_once, first_difference, text_of
from tests.ranks import on_ranks


class Callable_:
    def __call__(self) -> None:
        pass


TEXTS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "None"),
    "a name": ("each", "'each'"),
    "a function of a module": (text_of, "funcshard.comm.agreement.text_of"),
    "a lambda": (lambda: None, "a function"),
    "an object that is called": (Callable_(), "a function"),
    "options of a function": (
        functools.partial(text_of, 1, b=torch.float32, a=True),
        "funcshard.comm.agreement.text_of(1, a=True, b=torch.float32)",
    ),
    "a set, in one order in all processes": ({"b", "a"}, "['a', 'b']"),
    "a dictionary, in one order in all processes": ({"b": 2, "a": [1]}, "{'a': [1], 'b': 2}"),
    "a scaler": (fs.GradScaler(8.0, 2.0, 0.5, 10), text_of(fs.GradScaler(8.0, 2.0, 0.5, 10))),
    "a number in a tensor": (torch.tensor(2), "2"),
    "a tensor": (torch.zeros(3), "a Tensor"),
    "an object, whose text may hold its address": (object(), "a object"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_an_argument_has_the_same_text_in_every_process(case: str) -> None:
    value, text = TEXTS[case]
    assert text_of(value) == text
    assert " at 0x" not in text


SAME = "must be the same on every rank; rank 4 has"
DIFFERENCES: dict[str, tuple[list[dict[str, str]], str]] = {
    "equal": ([{"x": "1"}, {"x": "1"}], ""),
    "one text":
        ([{"x": "1"}, {"x": "1"}, {"x": "2"}], f"x {SAME} 1 and rank 6 has 2: build it from the same arguments everywhere"),
    "the first of two": ([{"x": "1", "y": "1"}, {"x": "1", "y": "2"}], f"y {SAME} 1"),
    "one that the first rank lacks": ([{"x": "1"}, {"x": "1", "y": "2"}], f"y {SAME} noth"),
    "a text that begins with the other one":
        ([{"x": "/" * 90}, {"x": "/" * 90 + "0"}], f"x {SAME} …{'/' * 40} and rank 5 has …{'/' * 40}0: "),
    "a lambda and a function": ([{"x": "a function"}, {"x": "torch.compile"}], ""),
    "a lambda and none": ([{"x": "a function"}, {"x": "None"}], f"x {SAME} a function"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENCES)
def test_the_first_difference_names_ranks_and_texts(case: str) -> None:
    rows, words = DIFFERENCES[case]
    found = first_difference(rows, range(4, 4 + len(rows)))
    assert found.startswith(words) if words else found == ""


@on_ranks({"replicate": 2, "shard": 2})
def test_texts_that_ranks_agreed_on_are_not_exchanged_again(mesh: fs.Mesh) -> None:
    for number, agreed in (("1", 1), ("1", 1), ("2", 2), ("1", 2)):
        check_once(mesh, {"x": number}, "a test")
        assert len(mesh.memo) == agreed
    check_once(mesh["shard"], {"x": "1"}, "a test")  # another mesh, which has to agree by itself
    assert len(mesh.memo) == 3


def test_a_rank_that_agrees_on_something_new_alone_is_found() -> None:
    def main(mesh: fs.Mesh) -> None:
        check_once(mesh, {"x": "1"}, "a test")
        check_once(mesh, {"x": "2" if mesh.rank else "1"}, "a test")
        fs.psum(torch.ones(1), mesh)

    with pytest.raises(RuntimeError, match="all_gather_text of text of a test"):
        fs.simulate(main, 2)
