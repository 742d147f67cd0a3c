"""Write the counts of the last whole campaign into docs/reliability.md.

``python -m tests.hostile.report COUNTS.json`` reads what ``--hostile-report COUNTS.json`` wrote,
keeps a copy beside this file, and replaces the table of the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["COUNTS", "PAGE", "page", "table"]

ROOT = Path(__file__).resolve().parents[2]
PAGE, COUNTS = ROOT / "docs" / "reliability.md", Path(__file__).with_name("counts.json")
BEGIN, END = "<!-- counts of the last campaign -->\n", "<!-- end of the counts -->\n"


def table(record: Mapping[str, Any]) -> str:
    """Return the counts of a campaign as a table of the page."""
    rows = ["| campaign | seeds | what was done | faults | minutes |", "|---|---|---|---|---|"]
    for each in sorted(record["campaigns"], key=lambda row: row["test"]):
        counts = dict(each["counts"])
        rounds = counts.pop("rounds")
        done = ", ".join(f"{number:,} {name}" for name, number in sorted(counts.items())) or "–"
        seeds = f"{each['seed']}–{each['seed'] + rounds - 1}" if rounds > 1 else str(each["seed"])
        name = each["test"].removeprefix("tests/hostile/").replace("::", ": ").replace("_", " ")
        name = name.removeprefix("test ").replace(".py: test ", ": ")
        rows.append(f"| {name} | {seeds} | {done} | {len(each['faults'])} | {each['seconds'] / 60:.1f} |")
    return "\n".join(rows) + "\n"


def page(text: str, record: Mapping[str, Any]) -> str:
    """Return the page with the table of a campaign in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest, f"docs/reliability.md has no line {BEGIN!r}"
    return f"{before}{BEGIN}\n{table(record)}\n{END}{after}"


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    COUNTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), found))
