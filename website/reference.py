"""Pages of the API reference: one for each public name, from docs/names.md and the docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Name", "link_names", "page_of", "public_names", "short_rows"]

# Classes that public functions return. Their pages stand beside the function that makes them.
RETURNED = {
    "trace": ("funcshard.graph.Traced", "funcshard.graph.StepCost", "funcshard.graph.StepMemory"),
    "profile": ("funcshard.estimate.Profile",),
    "estimate": ("funcshard.estimate.Report",),
    "auto_plan": ("funcshard.estimate.Best", "funcshard.estimate.Infeasible", "funcshard.estimate.Space"),
    "compare": ("funcshard.estimate.Comparison",),
}

CELL = re.compile(r"^\| (`(?:fs|funcshard)\.(?:[^|\\]|\\.)*) \|", re.MULTILINE)  # the first of a row
NAME = re.compile(r"`(?:fs|funcshard)\.([\w.]+)")
CODE = re.compile(r"(?<!\[)`((?:fs|funcshard)\.[\w.]+|(?:notebooks/)?\w+\.ipynb|examples/\w+\.py)(?:\([^`]*)?`(?!\])")
SIGNATURE = re.compile(r"`((?:fs|funcshard)\.[\w.]+)\([^`]*`(?: `-> [^`]*`)?")
VERBATIM = re.compile(r"(^```[\s\S]*?^```$|^ {4}.*$|^#.*$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Name:
    """One public name.

    Attributes:
        short: the name as code writes it after ``fs.``, such as ``wrap.by_class``.
        full: the dotted path for mkdocstrings.
        section: the heading of docs/names.md under which the name stands.
        constructed: whether it is a class that scripts construct, so that its page has a signature.
    """

    short: str
    full: str
    section: str
    constructed: bool = False

    @property
    def title(self) -> str:
        """The title of the page: the name as a script writes it."""
        return self.full if self.short.startswith("testing.") else f"fs.{self.short}" if self.called else self.short

    @property
    def called(self) -> bool:
        """Whether scripts reach the name through ``fs``."""
        places = (
            "funcshard", f"funcshard.{self.short}", "funcshard.linalg", "funcshard.plan.wrap", "funcshard.graph.passes"
        )  # fmt: skip
        return self.full.rpartition(".")[0] in places

    @property
    def path(self) -> str:
        """The page's file, relative to docs/."""
        return f"api/{self.short}.md"


def exported(init: Path) -> list[str]:
    """Return ``__all__`` of a Python file, without running it."""
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"{init} has no __all__")


def public_names(root: Path) -> list[Name]:
    """Return every public name in the order of docs/names.md.

    Raises:
        ValueError: a public name has no row in docs/names.md.
    """
    text = (root / "docs" / "names.md").read_text()
    doors = {
        "": exported(root / "funcshard" / "__init__.py"),
        "linalg.": exported(root / "funcshard" / "linalg.py"),
        "wrap.": exported(root / "funcshard" / "plan" / "wrap.py"),
        "passes.": exported(root / "funcshard" / "graph" / "passes" / "__init__.py"),
    }
    missing = {prefix + name for prefix, names in doors.items() for name in names} - {"linalg", "testing", "wrap", "passes"}
    found = []
    for section in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        heading = re.sub(r"[`]|fs\.", "", section.partition("\n")[0])
        for row in NAME.findall(" ".join(CELL.findall(section))):
            if row in missing or row.startswith("testing."):
                missing.discard(row)
                place = {"wrap": "plan.wrap", "passes": "graph.passes"}.get(row.partition(".")[0])
                full = f"funcshard.{place}.{row.partition('.')[2]}" if place else f"funcshard.{row}"
                if (root / "funcshard" / row).is_dir():  # a wing of the same name, whose door exports it
                    full = f"{full}.{row}"
                constructed = row.rpartition(".")[2][0].isupper() and bool(re.search(rf"`fs\.{row}\([^)]", section))
                found.append(Name(row, full, heading, constructed))
                found += [Name(each.rpartition(".")[2], each, heading) for each in RETURNED.get(row, ())]
    if missing:
        raise ValueError(f"docs/names.md has no row for {', '.join(sorted(missing))}: add one")
    return found


def page_of(name: Name) -> str:
    """Return the Markdown of a name's page."""
    page = f"::: {name.full}\n    options:\n      heading: {name.title}\n      toc_label: {name.title}\n"
    page += "      merge_init_into_class: true\n" if name.constructed else ""
    return page


def short_rows(text: str) -> str:
    """Return docs/names.md without arguments in its first column: the pages of names have them."""
    return CELL.sub(lambda cell: SIGNATURE.sub(r"`\1`", cell[0]), text)


def link_names(text: str, paths: dict[str, str]) -> str:
    """Return a page on which inline code such as ``fs.shard(...)`` links to the name's page.

    Arguments:
        text: Markdown. Code blocks, headings and links stay as they are.
        paths: name, notebook or example, as pages write it -> its page, relative to this page.
    """

    def pieces() -> Iterator[str]:
        for number, piece in enumerate(VERBATIM.split(text)):
            yield piece if number % 2 else CODE.sub(link, piece)

    def link(match: re.Match[str]) -> str:
        name = match[1]
        while name and name not in paths:  # fs.Mesh.reshaped stands on the page of fs.Mesh
            name = name.rpartition(".")[0]
        return f"[{match[0]}]({paths[name]})" if name else match[0]

    return "".join(pieces())
