"""The table of mistakes, and the part of the page that is written from it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.misuse import Setup

__all__ = ["MISTAKES", "PAGE", "Mistake", "mistake", "page"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mistakes.md"
BEGIN, END = "<!-- mistakes: begin; python -m tests.mistakes writes this part -->", "<!-- mistakes: end -->"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake.

    Attributes:
        section: the heading that the page lists it under.
        kind: the class of its error or warning.
        words: words of the message, which the page shows.
        cause: the mistake, in a sentence.
        cure: the remedy, in a sentence.
        program: the program that makes it.
    """

    section: str
    kind: type[BaseException]
    words: str
    cause: str
    cure: str
    program: Callable[[Setup], Any]

    def __str__(self) -> str:
        return self.words


MISTAKES: list[Mistake] = []


def mistake(
    section: str, kind: type[BaseException], words: str, cause: str, cure: str, program: Callable[[Setup], Any]
) -> None:
    """Add a mistake to the table."""
    MISTAKES.append(Mistake(section, kind, words, cause, cure, program))


def page(text: str) -> str:
    """Return the page with its generated part written anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    parts = []
    for section in dict.fromkeys(each.section for each in MISTAKES):
        parts.append(f"## {section}")
        own = [each for each in MISTAKES if each.section == section]
        parts += [f"- `{each.kind.__name__}: {each.words}`\n\n{_answer(each)}" for each in own]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def _answer(mistake: Mistake) -> str:
    """Return cause and cure as a paragraph of a list, in lines that break between words only."""
    text = f"*Cause:* {mistake.cause} *Cure:* {mistake.cure}"
    indent = "  "
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
