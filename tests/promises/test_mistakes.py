"""Each mistake on the page "Mistakes and remedies" gives the message that the page lists."""

import warnings

import pytest

import funcshard as fs
from tests.mistakes import MISTAKES, PAGE, page
from tests.misuse import set_up


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_the_message_names_the_mistake(mistake):
    warns = issubclass(mistake.kind, Warning)
    setup = set_up(fs.Mesh())
    with warnings.catch_warnings():
        warnings.simplefilter("error" if warns else "ignore")
        with pytest.raises(mistake.kind) as raised:
            mistake.program(setup)
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert mistake.words in text, text


def test_no_message_stands_for_two_mistakes():
    assert len({mistake.words for mistake in MISTAKES}) == len(MISTAKES) >= 80  # as the changelog says


def test_the_page_lists_these_mistakes():
    text = PAGE.read_text()
    assert text == page(text), "docs/mistakes.md is stale: run python -m tests.mistakes"
