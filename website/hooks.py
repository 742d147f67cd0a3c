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
CELL = re.compile(r"<td[ >].*?</td>", re.DOTALL)
IN_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµ]?s|[KMGT]i?B|B)(?:[ ,;:)<]|$))")  # between a number and its unit
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
    """Mark blocks of text in columns, whose lines must not wrap, and say where cells may."""
    html = CELL.sub(lambda match: UNIT.sub("\N{NO-BREAK SPACE}", IN_CODE.sub(breakable, match[0])), html)
    return COLUMNS.sub(
        lambda match: match[0].replace("<pre", '<pre class="columns"', 1) if drawn(match[0]) else match[0], html
    )


def breakable(match: re.Match[str]) -> str:
    """Return the code of a cell with places to break a line, so that no word is cut on a phone."""
    return re.sub(r"(?<=\w)(?:[._/=(,](?=[\w\"'*]))", r"\g<0><wbr>", match[0])


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
    paths |= (
        {}
        if folder == "notebooks"
        else {f"notebooks/{file.name}": posixpath.relpath(f"notebooks/{file.stem}.md", folder) for file in NOTEBOOKS}
    )
    paths |= {f"examples/{file.name}": posixpath.relpath(f"examples/{file.stem}.md", folder) for file in EXAMPLES}
    if here == "examples.md":  # its table has the names without the folder
        markdown = re.sub(r"^\| `(\w+\.py)` \|", r"| `examples/\1` |", markdown, flags=re.MULTILINE)
    return link_names(short_rows(markdown) if here == "names.md" else markdown, paths)
