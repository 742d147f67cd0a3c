"""Docstrings as Markdown: griffe, which mkdocstrings reads Python with, calls this extension."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Docstrings", "as_markdown"]


RESULT = re.compile(r"^(Returns:\n    )(.*:.*)$", re.MULTILINE)


def as_result(line: str) -> str:
    """Return the first line of a result, of which griffe takes all before a colon as its type."""
    typed = re.match(r"``([^`:]*)``: (.*)", line)
    return f"{typed[1]}: {typed[2]}" if typed else f": {line}"


def one_each(line: re.Match[str]) -> str:
    """Return a line for each of the attributes that share one."""
    return "\n".join(f"    {name}: {line[2]}" for name in line[1].split(", "))


def as_markdown(text: str) -> str:
    """Return a docstring of ours in the words that griffe and Markdown know."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)  # the mark before an indented block
    text = re.sub(r"^Source: ", "*Source:* ", text, flags=re.MULTILINE)
    text = RESULT.sub(lambda match: match[1] + as_result(match[2]), text)
    # Attributes that share a line, as in "shard, replicate: the groups".
    return re.sub(r"^    (\w+(?:, \w+)+): (.*)$", one_each, text, flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        show_constants(pkg, pkg)


def show_constants(place: griffe.Module | griffe.Class, package: griffe.Module) -> None:
    """Let signatures show the values of constants such as ``GIVE_UP``, and not their names."""
    for member in place.members.values():
        if isinstance(member, griffe.Function):
            for parameter in member.parameters:
                if isinstance(parameter.default, griffe.ExprName):
                    path = parameter.default.canonical_path.removeprefix(f"{package.path}.")
                    found = package.members.get(path.partition(".")[0]) and package[path]
                    if isinstance(found, griffe.Attribute) and isinstance(found.value, str):
                        parameter.default = found.value
        elif isinstance(member, griffe.Module | griffe.Class):
            show_constants(member, package)
