"""The arguments that several commands take."""

from __future__ import annotations

import argparse
import pkgutil
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from funcshard._utils.options import did_you_mean
from funcshard.demo.gpt import GPTConfig
from funcshard.plan import STRATEGIES

MOST = 10**9
MOST_PROCESSES = 1024


def at_least(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return the type of an argument that's a whole number."""

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"[+-]?\d{1,30}", text) else None
        if number is None or number < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number, at least {least}; found {text!r:.40}"
            )
        # Why a bound: a size with a few digits too many would take the machine's memory, or not
        # end.
        if number > most:
            raise argparse.ArgumentTypeError(
                f"must be at most {most:,}; found {text!r:.40}"
            )
        return number

    return parse


def add_number(
    group: Any,
    name: str,
    default: int,
    meaning: str,
    *,
    least: int = 1,
    most: int = MOST,
    alias: str | None = None,
) -> None:
    """Add an option that's a whole number, such as ``--steps``."""
    group.add_argument(
        *([name] if alias is None else [name, alias]),
        type=at_least(least, most),
        default=default,
        metavar="N",
        help=f"{meaning} (default: %(default)s)",
    )


def add_mesh(
    parser: argparse.ArgumentParser,
    ranks: str,
    *,
    most: int,
    units: str = "blocks.*",
    alias: str | None = None,
) -> None:
    """Add the arguments of a mesh and of its units.

    Arguments:
        parser: the parser.
        ranks: help for ``--ranks``.
        most: the largest number of ranks.
        units: the default of ``--units``, as text.
        alias: another name of ``--ranks``.
    """
    add_number(parser, "--ranks", 2, ranks, most=most, alias=alias)
    add_number(parser, "--replicate", 1, "size of the replicate axis; divides the ranks")
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
    group, sizes = parser.add_argument_group("sizes of the GPT"), GPTConfig()
    add_number(group, "--width", sizes.width, "size of a token's vector", most=2**20)
    add_number(group, "--layers", sizes.layers, "number of blocks", most=10_000)
    add_number(group, "--heads", sizes.heads, "attention heads a block", most=2**20)
    add_number(group, "--context", sizes.context, "longest sequence, bytes", most=2**24)


def gpt_config(options: argparse.Namespace) -> GPTConfig:
    """Return the sizes of the demo's GPT that you passed."""
    return GPTConfig(options.width, options.layers, options.heads, options.context)


def check_mesh(world: int, replicate: int) -> None:
    """Raise unless the replicate axis divides the ranks."""
    if world % replicate:
        raise ValueError(
            f"--replicate must divide the number of ranks; found {replicate} and {world} ranks"
        )


def import_callable(option: str, spec: str) -> Callable[..., Any]:
    """Return the function that an option, such as ``--model``, names as ``MODULE:CALLABLE``.

    ``file.py:CALLABLE`` names a function in a file of any folder.
    """
    file_name, _, name = spec.rpartition(":")
    function: Any
    if file_name.endswith(".py") and Path(file_name).is_file():
        namespace = runpy.run_path(file_name, run_name=Path(file_name).stem)
        function = namespace.get(name)
        if function is None:
            functions = [key for key, value in namespace.items() if callable(value)]
            raise ValueError(
                f"{option} must name a function of {file_name}; found {name!r}: "
                + did_you_mean(name, functions, otherwise="write FILE.py:FUNCTION")
            )
    else:
        try:
            function = pkgutil.resolve_name(spec)
        except (AttributeError, ImportError, ValueError) as error:
            raise ValueError(
                f"{option} must be MODULE:CALLABLE, such as my_package.models:make_model; found "
                f"{spec}: {error}"
            ) from error
    if not callable(function):
        raise ValueError(
            f"{option} {spec} must be callable; found {type(function).__name__}"
        )
    return function


def positive(text: str) -> float:
    """Return a positive number; for ``type=`` of an argument."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number; found {text!r}")
    return rate
