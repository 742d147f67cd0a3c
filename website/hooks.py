"""Functions that mkdocs calls while it builds the site.

They add the pages of the reference, of the notebooks and of files outside docs/, and link names.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from website.notebooks import notebook_page  # noqa: E402
from website.reference import link_names, page_of, public_names, short_rows  # noqa: E402

COLUMNS = re.compile(r'(?<=<div class="highlight">)<pre.*?</pre>', re.DOTALL)  # blocks without a language
# A paragraph of a list's item, which Python's Markdown wants indented by four.
IN_ITEM = re.compile(r"(?<=\n\n) {2,3}(?=\S).*(?:\n {2,3}(?=\S).*)*")
CELL = re.compile(r"<t([dh])[ >].*?</t\1>", re.DOTALL)
BLOCK = re.compile(r"(<pre.*?</pre>)", re.DOTALL)
IN_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
# Places where a long word breaks, the best ones first.
PLACES = [re.compile(p) for p in (r"(?<=.{4}[(,/])(?=[\w\"'*&\[{])", r"(?<=.{4}\.)(?=[^\W\d])", r"(?<=\w[_=])(?=[\w\"'&])")]
TITLE = re.compile(r"(?<=<h1)([^>]*>(?:\s*<[^>]*>)*\s*)([\w.]+)")
RANGE = re.compile(r"(?<=\d)–(?=\d)")
MINUS = re.compile(r"(<code>.*?</code>)|(?<=\([A-Za-z])-(?=\d\))")  # in a formula such as (n-1)/n, not in code
LONG = {"cell": 16, "text": 30}  # characters of a word that a line holds, also on a phone
UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµ]?s|[KMGT]i?B|B)(?:[ ,;:)<]|$))")  # between a number and its unit
# A cell of a number and few words, such as "1.2 (1.1–1.3)": one line, where the screen has room.
NUMBER = re.compile(r"(<td[^>]*>)(?=[^<]{3,26}</td>)(\d[^< ]* [^<]*)(</td>)")
LINE = re.compile(r'<span id="__span[\d-]+">(?:<a [^>]*></a>)?(?=(?:<span class="w">)?( *))')
OPTION = re.compile(r"(?<=[\s>])--[a-z][\w-]*")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Pages that stand elsewhere in the repository: file -> page.
ELSEWHERE = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages in the place of ``{reference}`` and the like in mkdocs.yml."""
    sections: dict[str, list[Any]] = {}
    for name in public_names(ROOT):
        sections.setdefault(name.section, []).append({name.title: name.path})
    generated: dict[str, list[Any]] = {
        "{reference}": [{section: pages} for section, pages in sections.items()],
        "{examples}": [{file.name: f"examples/{file.stem}.md"} for file in EXAMPLES],
        "{notebooks}": [f"notebooks/{notebook.stem}.md" for notebook in NOTEBOOKS],
    }

    def filled(entries: list[Any]) -> list[Any]:
        result: list[Any] = []
        for entry in entries:
            if isinstance(entry, dict):
                result.append({k: filled(v) if isinstance(v, list) else v for k, v in entry.items()})
            else:
                result += generated.get(entry, [entry])
        return result

    config.nav = filled(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name in public_names(ROOT):
        files.append(File.generated(config, name.path, content=page_of(name)))
    for notebook in NOTEBOOKS:
        page, pictures = notebook_page(notebook, "pictures")
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page))
        files.append(File.generated(config, f"notebooks/{notebook.name}", content=notebook.read_text()))
        for picture, content in pictures.items():
            files.append(File.generated(config, f"notebooks/pictures/{picture}", content=content))
    for file in EXAMPLES:
        page = f"# {file.name}\n\n```python\n{file.read_text()}```\n"
        files.append(File.generated(config, f"examples/{file.stem}.md", content=page))
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text().replace("](docs/", "](").replace("](README.md", "](index.md")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Mark blocks of text in columns, whose lines must not wrap, and say where other code may."""
    pieces = BLOCK.split(CELL.sub(cell, html))
    for number, piece in enumerate(pieces):
        if number % 2:  # a block of code, in which no line breaks inside "--"
            piece = OPTION.sub(lambda match: f'<span class="word">{match[0]}</span>', piece)
            # What wraps is indented by more than its line.
            pieces[number] = LINE.sub(lambda match: f'<span class="line" style="--indent:{len(match[1])}">', piece)
        else:
            pieces[number] = IN_CODE.sub(lambda match: breakable(match[0], LONG["text"]), piece)
    html = TITLE.sub(lambda match: match[1] + breakable(match[2], LONG["cell"]), "".join(pieces))
    return COLUMNS.sub(
        lambda match: match[0].replace("<pre", '<pre class="columns"', 1) if drawn(match[0]) else match[0], html
    )


def cell(match: re.Match[str]) -> str:
    """Return a cell in which no line breaks before a unit or inside a range or a formula."""
    found = UNIT.sub("\N{NO-BREAK SPACE}", IN_CODE.sub(lambda code: breakable(code[0], LONG["cell"]), match[0]))
    found = MINUS.sub(lambda match: match[1] or "\N{MINUS SIGN}", RANGE.sub("–\N{WORD JOINER}", found))
    return NUMBER.sub(r'\1<span class="number">\2</span>\3', found)


def breakable(code: str, longest: int) -> str:
    """Return inline code with places to break long words, and none in words such as ``--json``."""

    def word(match: re.Match[str]) -> str:
        if len(match[0]) <= longest:
            return f'<span class="word">{match[0]}</span>' if "-" in match[0] or "[" in match[0] else match[0]
        parts = [match[0]]
        for place in PLACES:
            parts = [each for part in parts for each in (place.split(part) if len(part) > longest else [part])]
        return "<wbr>".join(parts)

    return re.sub(r"\S+", word, code)


def drawn(block: str) -> bool:
    """Return whether a block is a drawing or a table made of characters."""
    if '<span class="n">' in block:  # Python, whose indentation is no column
        return False
    return bool(set("─│└▸") & set(block)) or len(re.findall(r"^.*\S {3,}[^#\s]", block, re.MULTILINE)) > 2


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Link names such as ``fs.shard`` to their pages in the reference."""
    here = page.file.src_uri
    if here.startswith("api/"):
        return markdown
    folder = posixpath.dirname(here) or "."
    markdown = IN_ITEM.sub(lambda match: re.sub(r"^ +", "    ", match[0], flags=re.MULTILINE), markdown)
    for source, target in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{source}", f"]({target}").replace(f"]({source}", f"]({target}")
    paths = {f"fs.{name.short}": posixpath.relpath(name.path, folder) for name in public_names(ROOT)}
    paths |= {name.title: posixpath.relpath(name.path, folder) for name in public_names(ROOT) if "." in name.title}
    beside = folder == "notebooks"  # a notebook calls the others by their bare names
    names = {file: file.name if beside else f"notebooks/{file.name}" for file in NOTEBOOKS}
    paths |= {name: posixpath.relpath(f"notebooks/{file.stem}.md", folder) for file, name in names.items()}
    paths |= {f"examples/{file.name}": posixpath.relpath(f"examples/{file.stem}.md", folder) for file in EXAMPLES}
    if here == "examples.md":  # its table has the names without the folder
        markdown = re.sub(r"^\| `(\w+\.py)` \|", r"| `examples/\1` |", markdown, flags=re.MULTILINE)
    return link_names(short_rows(markdown) if here == "names.md" else markdown, paths)
