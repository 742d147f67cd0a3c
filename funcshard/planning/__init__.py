"""Plans of whole runs: from a model or its files to an answer on one screen.

In reading order:

- ``model_inputs``: a batch of a model, its loss, and its trace.
- ``adapters``: adapters of peft around frozen weights.
- ``tensor_parts``: one rank's part of a model under tensor parallelism.
- ``preferences``: a policy and its reference, for DPO.
- ``run_plan``: ``plan_run`` and its result.
- ``script``: the training script of a result.
- ``answers``: answers of the command on disk.
"""

from __future__ import annotations

from funcshard.planning.answers import Answer, answer_file, read_answer, write_answer
from funcshard.planning.model_inputs import LONGEST, OTHERS, InputMaker, default_seq, trace
from funcshard.planning.run_plan import PRECISIONS, RunPlan, plan_run, plan_within

__all__ = [
    "LONGEST",
    "OTHERS",
    "PRECISIONS",
    "Answer",
    "InputMaker",
    "RunPlan",
    "answer_file",
    "default_seq",
    "plan_run",
    "plan_within",
    "read_answer",
    "trace",
    "write_answer",
]
