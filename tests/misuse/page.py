"""The part of the page "Common mistakes" that is written from the table."""

from __future__ import annotations

import textwrap

from tests.misuse import ROOT, Case
from tests.misuse.documented import CASES

__all__ = ["PAGE", "page"]

PAGE = ROOT / "docs" / "mistakes.md"
BEGIN, END = "<!-- mistakes: begin; python -m tests.misuse writes this part -->", "<!-- mistakes: end -->"


def page(text: str) -> str:
    """Return the page with its generated part written again."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    parts = []
    for section in dict.fromkeys(case.section for case in CASES.cases):
        parts.append(f"## {section}")
        parts += [_entry(case) for case in CASES.cases if case.section == section]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def _entry(case: Case) -> str:
    """Return the message, then mistake and cure as a paragraph that breaks between words only."""
    text = f"{case.name} {case.cure}"
    answer = textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return f"- `{case.outcome.kind.__name__}: {case.outcome.words[0]}`\n\n{answer}"
