"""All models of the zoo."""

from __future__ import annotations

from tests.zoo.other_models import SUBJECTS as OTHERS
from tests.zoo.transformers_models import ADAPTERS
from tests.zoo.transformers_models import SUBJECTS as TRANSFORMERS

__all__ = ["SUBJECTS"]

SUBJECTS = (*TRANSFORMERS, *ADAPTERS, *OTHERS)
