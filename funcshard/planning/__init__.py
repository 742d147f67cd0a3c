"""Plans of whole runs: from a model or its files to an answer on one screen.

In reading order:

- ``model_inputs``: a batch of a model of transformers, and its loss.
- ``run_plan``: ``plan_run`` and its result.
- ``script``: the training script of a result.
"""

from __future__ import annotations

from funcshard.planning.run_plan import RunPlan, plan_run

__all__ = ["RunPlan", "plan_run"]
