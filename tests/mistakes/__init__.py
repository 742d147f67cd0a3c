"""The mistakes on the page "Mistakes and remedies": each with its message, its cause and its cure.

``tests/promises/test_mistakes.py`` makes each mistake and asserts the message. The page lists the
same messages; ``python -m tests.mistakes`` writes that part of ``docs/mistakes.md`` anew.
"""

from tests.mistakes import calls, training
from tests.mistakes.table import MISTAKES, PAGE, page

__all__ = ["MISTAKES", "PAGE", "calls", "page", "training"]
