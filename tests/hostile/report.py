"""Write the counts of the last whole campaign into docs/dev/campaign.md.

``python -m tests.hostile.report COUNTS.json`` reads what ``--hostile-report COUNTS.json`` wrote, and
replaces the table of the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dev" / "campaign.md"
BEGIN, END = "<!-- counts of the last campaign -->\n", "<!-- end of the counts -->\n"
HEAD = "| campaign | seeds | what was done | faults | minutes |\n|---|---|---|---|---|\n"


def row_of(campaign: Mapping[str, Any]) -> str:
    counts = dict(campaign["counts"])
    first, rounds = campaign["seed"], counts.pop("rounds")
    done = ", ".join(f"{number:,} {name}" for name, number in sorted(counts.items())) or "–"
    seeds = f"{first}–{first + rounds - 1}" if rounds > 1 else str(first)
    file, test = campaign["test"].removeprefix("tests/hostile/test_").split(".py::test_")
    name = f"{file}: {test}".replace("_", " ")
    return f"| {name} | {seeds} | {done} | {len(campaign['faults'])} | {campaign['seconds'] / 60:.1f} |\n"


def page(text: str, record: Mapping[str, Any]) -> str:
    """Return the page with the counts of a campaign as its table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest, f"docs/dev/campaign.md has no line {BEGIN!r}"
    rows = map(row_of, sorted(record["campaigns"], key=lambda campaign: campaign["test"]))
    return f"{before}{BEGIN}\n{HEAD}{''.join(rows)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), json.loads(Path(sys.argv[1]).read_text())))
