"""Notebooks as pages: the stored outputs, without running a cell."""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

__all__ = ["notebook_page"]

LINES = re.compile(r"\n\s*")
COLUMNS = re.compile(r"\S {3,}\S")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
WIDE = 720  # pixels of a picture whose letters a phone would show too small


def notebook_page(notebook: Path, folder: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, with its pictures.

    Arguments:
        notebook: the ``.ipynb`` file, stored with its outputs.
        folder: the pictures' folder, relative to the page.

    Returns:
        ``(markdown, pictures)``: the page, and file name -> PNG bytes.
    """
    pictures: dict[str, bytes] = {}
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../"))
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source.rstrip()}\n```")
            for output in joined(cell["outputs"]):
                parts.append(output_part(output, f"{notebook.stem}-{len(pictures)}.png", folder, pictures))
    first, *rest = parts
    note = f"*This page shows stored outputs. To run the cells, [download the notebook]({notebook.name}).*"
    title, _, text = first.partition("\n")
    return "\n\n".join([title, note, text.strip(), *rest]) + "\n", pictures


def joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return outputs in which prints that follow each other are one."""
    result: list[dict[str, Any]] = []
    for output in outputs:
        if result and "stream" == output["output_type"] == result[-1]["output_type"]:
            text = "".join(result[-1]["text"]) + "".join(output["text"])
            result[-1] = {**output, "text": text}
        else:
            result.append(output)
    return result


def output_part(output: dict[str, Any], name: str, folder: str, pictures: dict[str, bytes]) -> str:
    """Return one output as Markdown, and add its picture to ``pictures``."""
    data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
    if "image/png" in data:
        picture = pictures[name] = base64.b64decode(data["image/png"])
        image = f"![output of the cell above]({folder}/{name})"
        width = int.from_bytes(picture[16:20], "big")  # of a PNG file
        return f'<div class="wide" markdown>\n\n{image}\n\n</div>' if width > WIDE else image
    if "text/html" in data:
        table = LINES.sub(" ", data["text/html"])
        return f'<div class="cell-output">{table}</div>'
    text = ANSI.sub("", data.get("text/plain", "".join(output.get("text", ""))).rstrip())
    # Why: a line break inside would end the block, because Markdown looks for an empty line.
    escaped = html.escape(text).replace("\n", "&#10;")
    columns = " columns" if len(COLUMNS.findall(text)) > 1 else ""  # their lines do not wrap
    return f'<pre class="cell-output{columns}">{escaped}</pre>'
