"""The types of arguments that several commands take, and the error for wrong input."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable
from typing import Any

from funcshard.plan import STRATEGIES

MOST = 10**9


class BadInputError(Exception):
    """Wrong input from the command line: one line for the user, and exit code 2."""


def at_least(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number.

    Why a bound: a size with a few digits too many would take the machine's memory, or not end.
    """

    def parse(text: str) -> int:
        integer_value = int(text) if re.fullmatch(r"[+-]?\d{1,30}", text) else None
        shown = text if len(text) < 40 else f"{text[:40]}…"
        if integer_value is None or integer_value < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number, at least {least}; found {shown!r}"
            )
        if integer_value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most:,}; found {shown!r}")
        return integer_value

    return parse


def add_mesh(parser: argparse.ArgumentParser, ranks: str, units: str = "blocks.*") -> None:
    """Add the arguments of a mesh and of its units.

    Arguments:
        parser: the parser.
        ranks: help for ``--ranks``.
        units: the default of ``--units``, as text.
    """
    parser.add_argument("--ranks", type=at_least(1), default=2, metavar="N", help=ranks)
    parser.add_argument(
        "--replicate",
        type=at_least(1),
        default=1,
        metavar="N",
        help="size of the replicate axis; divides the ranks",
    )
    parser.add_argument(
        "--strategy", choices=STRATEGIES, default=STRATEGIES[0], help="how units are sharded"
    )
    parser.add_argument(
        "--units", nargs="*", metavar="GLOB", default=argparse.SUPPRESS,
        help=f"paths or globs of the modules that are units; without any, the root is the only unit (default: {units})",
    )  # fmt: skip


def check_mesh(world: int, replicate: int) -> None:
    """Raise unless the replicate axis divides the ranks."""
    if world % replicate:
        raise BadInputError(
            f"--replicate must divide the number of ranks; found {replicate} and {world} ranks"
        )


def import_callable(option: str, spec: str) -> Callable[..., Any]:
    """Return the function that an option names as ``MODULE:CALLABLE``.

    Arguments:
        option: name of the option, for errors.
        spec: its value.
    """
    name, _, attribute = spec.partition(":")
    if not name or not attribute:
        raise BadInputError(
            f"{option} must be MODULE:CALLABLE, such as my_package.models:make_model; found "
            f"{spec!r}"
        )
    try:
        imported_value: Any = importlib.import_module(name)
        for part in attribute.split("."):
            imported_value = getattr(imported_value, part)
    except (ImportError, AttributeError) as error:
        raise BadInputError(f"{option} {spec}: {error}") from error
    if not callable(imported_value):
        raise BadInputError(
            f"{option} {spec} must be callable; found {type(imported_value).__name__}"
        )
    return imported_value
