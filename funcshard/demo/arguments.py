"""The arguments that several commands take; wrong ones are a ``ValueError``."""

from __future__ import annotations

import argparse
import pkgutil
import re
from collections.abc import Callable
from typing import Any

from funcshard.demo.gpt import GPTConfig
from funcshard.plan import STRATEGIES

MOST = 10**9


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
    parser.add_argument(
        "--ranks", type=at_least(1), default=2, metavar="N", help=f"{ranks} (default: %(default)s)"
    )
    parser.add_argument(
        "--replicate",
        type=at_least(1),
        default=1,
        metavar="N",
        help="size of the replicate axis; divides the ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default=STRATEGIES[0],
        help="how units are sharded (default: %(default)s)",
    )
    parser.add_argument(
        "--units", nargs="*", metavar="GLOB",
        help=f"paths or globs of the modules that are units; without any, the root is the only unit (default: {units})",
    )  # fmt: skip


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the demo's GPT; see ``gpt_config``."""
    group, defaults = parser.add_argument_group("sizes of the GPT"), GPTConfig()
    for name, most, meaning in (
        ("width", 1_048_576, "size of a token's vector"),
        ("layers", 10_000, "number of blocks"),
        ("heads", 1_048_576, "attention heads a block"),
        ("context", 16_777_216, "longest sequence, bytes"),
    ):
        group.add_argument(
            f"--{name}",
            type=at_least(1, most),
            default=getattr(defaults, name),
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )


def gpt_config(options: argparse.Namespace) -> GPTConfig:
    """Return the sizes of the demo's GPT that the user passed."""
    return GPTConfig(options.width, options.layers, options.heads, options.context)


def check_mesh(world: int, replicate: int) -> None:
    """Raise unless the replicate axis divides the ranks."""
    if world % replicate:
        raise ValueError(
            f"--replicate must divide the number of ranks; found {replicate} and {world} ranks"
        )


def import_callable(option: str, spec: str) -> Callable[..., Any]:
    """Return the function that an option names as ``MODULE:CALLABLE``.

    Arguments:
        option: name of the option, for errors.
        spec: its value.
    """
    try:
        imported_value = pkgutil.resolve_name(spec)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(
            f"{option} must be MODULE:CALLABLE, such as my_package.models:make_model; found "
            f"{spec}: {error}"
        ) from error
    if not callable(imported_value):
        raise ValueError(f"{option} {spec} must be callable; found {type(imported_value).__name__}")
    function: Callable[..., Any] = imported_value
    return function
