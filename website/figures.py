"""The figures of the documentation, as SVG.

    python -m website.figures

writes them to docs/pictures/. A figure is 480 wide and its text at least 14 high, so that it can
be read on a phone. It has a background of its own and follows the reader's colour scheme.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["FIGURES", "Drawing"]

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH = 480

STYLE = """
text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--ink); }
.small { font-size: 14px; } .bold { font-weight: 600; } .soft { fill: var(--soft); }
.on { fill: #ffffff; } .middle { text-anchor: middle; } .end { text-anchor: end; }
.line { stroke: var(--soft); stroke-width: 1.5; fill: none; } .dash { stroke-dasharray: 4 4; }
.back { fill: var(--back); } .faint { fill: var(--faint); } .blue { fill: #3f51b5; } .teal { fill: #00796b; }
.orange { fill: #c2570c; } .grey { fill: #757575; } .none { fill: none; }
svg { --ink: #1d1d25; --soft: #5f6070; --back: #ffffff; --faint: #e9eaf2; }
@media (prefers-color-scheme: dark) { svg { --ink: #ececf4; --soft: #a9abbb; --back: #1e2129; --faint: #333745; } }
"""


@dataclass(slots=True)
class Drawing:
    """The elements of a figure.

    Attributes:
        title: the text that a screen reader reads.
        height: in the units of the figure, which is ``WIDTH`` wide.
        parts: the elements, in drawing order.
    """

    title: str
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """Draw a filled rectangle."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{style}"/>')

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Write one line; ``y`` is its base."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{words}</text>')

    def line(self, *points: tuple[float, float], style: str = "line", arrow: bool = False) -> None:
        """Draw a line through points."""
        end = ' marker-end="url(#tip)"' if arrow else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="{style}"{end}/>')

    def label(self, x: float, y: float, width: float, height: float, style: str, words: str, size: str = "") -> None:
        """Draw a rectangle with white words in its middle."""
        self.box(x, y, width, height, style)
        self.text(x + width / 2, y + height / 2 + 5, words, f"on middle {size}")

    def svg(self) -> str:
        """Return the file."""
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        tip += '<path d="M0,0 L8,4 L0,8 z" fill="#7b7d8c"/></marker>'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">',
            f"<title>{self.title}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{tip}</defs>",
            f'<rect width="{WIDTH}" height="{self.height}" rx="8" class="back"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def plan() -> Drawing:
    """Draw a unit's leaves, its flat buffer, and the shards of four ranks."""
    d = Drawing("A plan: the leaves of a unit, raveled into a flat buffer, cut into one shard for each rank", 384)
    left, full = 24, 432
    d.text(left, 34, "unit “0”: a linear layer", "bold")
    d.label(left, 48, 230, 92, "blue", "weight [64, 8]")
    d.label(left + 254, 48, 64, 92, "teal", "bias")
    d.text(left + 286, 160, "[64]", "small soft middle")
    d.line((240, 168), (240, 196), arrow=True)
    d.text(252, 188, "ravel and concatenate", "small soft")
    d.text(left, 188, "flat buffer", "bold")
    d.label(left, 204, 374, 38, "blue", "0 … 511")
    d.label(left + 376, 204, 56, 38, "teal", "… 575", "small")
    d.line((240, 248), (240, 276), arrow=True)
    d.text(252, 268, "cut into equal parts", "small soft")
    d.text(left, 268, "shards", "bold")
    part = (full - 3 * 12) / 4
    for rank in range(4):
        x = left + rank * (part + 12)
        d.box(x, 286, part, 38, "blue")
        if rank == 3:
            d.box(x + part - 44, 286, 44, 38, "teal")  # 64 of 144 elements
        d.text(x + part / 2, 344, f"rank {rank}", "middle")
    d.text(240, 370, "gather is the inverse: four shards make the leaves again", "small soft middle")
    return d


def step() -> Drawing:
    """Draw the memory of three units on one rank during a step."""
    d = Drawing("The life of a step: units are gathered, compute, and are freed; backward gathers them again", 372)
    left, column = 72, 57
    times = ["F 0", "F 1", "F 2", "B 2", "B 1", "B 0", "update"]
    d.text(left + 1.5 * column, 30, "forward", "bold middle")
    d.text(left + 4.5 * column, 30, "backward", "bold middle")
    for number, name in enumerate(times):
        d.text(left + (number + 0.5) * column + (2 if number == 6 else 0), 54, name, "small soft middle")
    for number in (3, 6):
        d.line((left + number * column, 16), (left + number * column, 286), style="line dash")
    for unit in range(3):
        base = 136 + 75 * unit  # the lower edge of the row
        d.text(16, base - 4, f"unit {unit}", "")
        d.box(left, base - 12, 7 * column, 12, "blue")  # the shard is always there
        backward = 5 - unit
        for start in {unit, backward}:
            d.box(left + start * column + 3, base - 60, column - 6, 48, "blue")
        x = left + backward * column
        d.box(x + column / 2, base - 60, column / 2 - 3, 46, "orange")
        d.box(x + column, base - 24, 6 * column - backward * column + column - column - 4, 12, "orange")
    y = 316
    for x, style, words in ((24, "blue", "parameters"), (166, "orange", "gradients")):
        d.box(x, y - 12, 14, 14, style)
        d.text(x + 22, y, words, "small")
    d.text(300, y, "tall: gathered", "small")
    d.text(300, y + 20, "flat: this rank’s shard", "small")
    d.text(24, y + 24, "F k, B k: forward and", "small soft")
    d.text(24, y + 42, "backward of unit k", "small soft")
    return d


def schedule() -> Drawing:
    """Draw the order of gathers, computation and reductions."""
    d = Drawing("The schedule of a step: the next unit is gathered, and the last one reduced, while a unit computes", 356)
    left, column = 92, 79

    def lane(y: int, name: str, blocks: list[tuple[float, float, str]], style: str) -> None:
        d.box(left, y, 4.7 * column, 34, "faint")
        d.text(16, y + 22, name)
        for start, length, words in blocks:
            d.label(left + start * column + 1, y, length * column - 2, 34, style, words)

    d.text(16, 30, "forward", "bold")
    lane(44, "gather", [(0, 0.7, "0"), (0.7, 0.7, "1"), (1.7, 0.7, "2")], "blue")
    lane(84, "compute", [(0.7, 1, "F 0"), (1.7, 1, "F 1"), (2.7, 1, "F 2")], "grey")
    d.text(16, 164, "backward", "bold")
    lane(178, "gather", [(0, 0.7, "2"), (0.7, 0.7, "1"), (1.7, 0.7, "0")], "blue")
    lane(218, "compute", [(0.7, 1, "B 2"), (1.7, 1, "B 1"), (2.7, 1, "B 0")], "grey")
    lane(258, "reduce", [(1.7, 0.8, "2"), (2.7, 0.8, "1"), (3.7, 0.8, "0")], "orange")
    d.line((left, 312), (left + 4.7 * column, 312), arrow=True)
    d.text(left + 4.7 * column, 334, "time", "small soft end")
    d.text(16, 334, "0, 1, 2: the units", "small soft")
    return d


def mesh() -> Drawing:
    """Draw a mesh of two by four ranks."""
    d = Drawing("A mesh of eight ranks: rows are the shard axis, columns the replicate axis", 330)
    left, column = 124, 86
    d.text(left + 2 * column - 8, 30, "shard axis: all-gather, reduce-scatter", "bold middle")
    d.line((left, 46), (left + 4 * column - 16, 46), arrow=True)
    for row in range(2):
        y = 66 + 96 * row
        d.text(16, y + 32, "replicate", "")
        d.text(16, y + 50, f"{row}", "")
        for number in range(4):
            x = left + number * column
            d.box(x, y, column - 16, 76, "faint")
            d.text(x + (column - 16) / 2, y + 25, f"rank {4 * row + number}", "middle")
            for piece in range(4):
                style = "blue" if piece == number else "back"
                d.box(x + 7 + 14.5 * piece, y + 42, 12.5, 22, style)
    d.line((104, 70), (104, 232), arrow=True)
    d.text(16, 266, "replicate axis: all-reduce of gradients", "bold")
    d.text(16, 290, "Ranks of a row hold the four shards of a unit.", "small soft")
    d.text(16, 312, "Ranks of a column hold the same shard.", "small soft")
    return d


FIGURES: dict[str, Callable[[], Drawing]] = {"plan": plan, "step": step, "schedule": schedule, "mesh": mesh}


def main() -> None:
    """Write every figure."""
    for name, draw in FIGURES.items():
        (PICTURES / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
