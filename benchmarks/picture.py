"""Draw a race as bars: the time of a step of every peer, as a multiple of one peer's.

python -m benchmarks.picture race.json docs/pictures/race.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from benchmarks.peers import TITLES
from benchmarks.results import ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "main"]

OURS, THEIRS, INK, FAINT = "#117733", "#88A0B0", "#333333", "#dddddd"
CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the line at 1 does not cross a number
NAMES = {"demo": "GPT, 10.8 M", "gpt": "GPT, 24.5 M", "wide": "wide GPT, 101 M", "deep": "100 small units"}


def draw(races: Sequence[Mapping[str, Any]], *, reference: str = "ddp", path: Path | None = None) -> Figure:
    """Draw one panel for each race, with one bar for each peer; whiskers are quartiles of the rounds.

    Arguments:
        races: as ``python -m benchmarks.step --json`` writes them: shape, ranks, and seconds by peer.
        reference: the peer whose time is 1. Races without it are left out.
        path: the file to save; ``None`` saves none.

    Raises:
        ValueError: no race has the reference.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = [race for race in races if reference in race["seconds"]]
    if not shown:
        raise ValueError(f"no race has the peer {reference!r}; name it in --peers of benchmarks.step")
    heights = [len(race["seconds"]) - 1 for race in shown]
    with rc_context({"svg.hashsalt": "race", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(5.8, 0.9 * len(shown) + 0.5 * sum(heights)), layout="constrained")
        panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)
        for axes, race in zip(panels.flat, shown, strict=True):
            _panel(axes, race, reference)
        panels.flat[-1].set_xlabel(f"time of a step ÷ {TITLES[reference]} (shorter is faster)", color=INK, fontsize=12)
        if path is not None:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return figure


def _panel(axes: Any, race: Mapping[str, Any], reference: str) -> None:
    seconds = {peer: own for peer, own in race["seconds"].items() if peer != reference}
    spreads = {peer: ratio(own, race["seconds"][reference]) for peer, own in seconds.items()}
    peers = sorted(seconds, key=lambda peer: -spreads[peer].median)
    values = [spreads[peer].median for peer in peers]
    # The quartiles are those within single rounds, and the ratio of two medians may lie outside.
    low = [max(spreads[peer].median - spreads[peer].low, 0) for peer in peers]
    high = [max(spreads[peer].high - spreads[peer].median, 0) for peer in peers]
    colours = [OURS if TITLES[peer].startswith("funcshard") else THEIRS for peer in peers]
    axes.barh(
        range(len(peers)), values, xerr=[low, high], color=colours, height=0.72, ecolor=INK, error_kw={"linewidth": 0.9}
    )
    edge = max(value + more for value, more in zip(values, high, strict=True))
    for row, (value, more) in enumerate(zip(values, high, strict=True)):
        axes.text(value + more + 0.015 * edge, row, f"{value:.2f}", va="center", fontsize=12, color=INK, bbox=CLEAR)
    axes.axvline(1.0, color=INK, linewidth=0.9)
    axes.set_yticks(range(len(peers)), [fill(TITLES[peer], 22) for peer in peers], fontsize=12)
    axes.set_xlim(0, 1.16 * edge)
    axes.set_title(f"{NAMES.get(race['shape'], race['shape'])}, {race['ranks']} ranks", loc="left", fontsize=13, color=INK)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description="Draw a race as bars.")
    parser.add_argument("race", type=Path, help="file that benchmarks.step --json has written")
    parser.add_argument("picture", type=Path, help="file to write: .svg or .png")
    parser.add_argument("--reference", default="ddp", choices=tuple(TITLES), help="the peer whose time is 1")
    options = parser.parse_args(arguments)
    draw(json.loads(options.race.read_text())["races"], reference=options.reference, path=options.picture)


if __name__ == "__main__":
    main()
