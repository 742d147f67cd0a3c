"""Tell errors of this library from errors of Python, torch or gloo that leave it by accident."""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import funcshard

_HOME = str(Path(funcshard.__file__).parent)
_RAISE = dis.opmap["RAISE_VARARGS"]
OURS: tuple[type[Exception], ...] = (ValueError, TypeError, OSError, RuntimeError)
# These are subclasses of the classes above, so ``isinstance`` alone would take them for errors of this
# library. Only Python and torch raise them: for a text that cannot be decoded, a nesting too deep, and an
# operation that torch lacks for a tensor. If one leaves this library, a check was missing.
_NEVER = (UnicodeError, RecursionError, NotImplementedError)


def fault_of(error: BaseException, kinds: tuple[type[Exception], ...] = OURS) -> str:
    """Return why an error is none of this library's own, or ``""`` if it is one.

    An error is our own if a ``raise`` in this library raised it, with words, or if it is an
    ``OSError`` of the system that names its file.
    """
    where = error.__traceback__
    if where is None:
        return f"{type(error).__name__} without a traceback: {error}"
    while where.tb_next is not None:
        where = where.tb_next
    code, place = where.tb_frame.f_code, f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
    named = isinstance(error, OSError) and OSError in kinds and error.errno and error.filename
    raised = code.co_filename.startswith(_HOME) and code.co_code[where.tb_lasti] == _RAISE
    if not isinstance(error, kinds) or isinstance(error, _NEVER):
        return f"{type(error).__name__} is no error for users ({place}): {error}"
    if not str(error).strip():
        return f"{type(error).__name__} without words ({place})"
    return "" if named or raised else f"{type(error).__name__} was not raised by this library ({place}): {error}"


def check_ours(error: BaseException, what: str, kinds: tuple[type[Exception], ...] = OURS) -> None:
    """Raise ``AssertionError`` unless an error is one of ours; ``what`` names what was called."""
    fault = fault_of(error, kinds)
    if fault:
        raise AssertionError(f"{what}: {fault}\n{''.join(traceback.format_exception(error)[-6:])}") from error


def outcome_of(call: Callable[[], Any], what: str, kinds: tuple[type[Exception], ...] = OURS) -> Any:
    """Return the result of ``call()``, or its error if that is one of ours; another one is an ``AssertionError``."""
    try:
        return call()
    except (AssertionError, Exception) as error:
        check_ours(error, what, kinds)
        return error
