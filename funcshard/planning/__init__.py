"""Plans of whole runs: from a model or its files to an answer on one screen.

In reading order:

- ``model_inputs``: a batch of a model, its loss, and its trace.
- ``adapters``: adapters of peft around frozen weights.
- ``tensor_parts``: one rank's part of a model under tensor parallelism.
- ``task_models``: a task as one module: a decoder that generates, a policy and its reference for
  DPO.
- ``tasks``: ``Training`` and ``Generation``: what a run does.
- ``planned_model``: a model as a task uses it.
- ``planned_run``: what the plans of both tasks say alike, and the memory that a run may use.
- ``run_plan``: ``plan_run`` and its result.
- ``generation``: its result for a model that generates.
- ``script``: the script of a result.
- ``answers``: answers of the command on disk.
"""

from __future__ import annotations

from funcshard.planning.adapters import STORAGES
from funcshard.planning.answers import Answer, answer_file, read_answer, write_answer
from funcshard.planning.generation import GenerationPlan
from funcshard.planning.model_inputs import LONGEST, OTHERS, InputMaker, default_seq, trace
from funcshard.planning.run_plan import RunPlan, plan_run, plan_within
from funcshard.planning.tasks import PRECISIONS, Generation, Training
from funcshard.planning.tensor_parts import AXIS

__all__ = [
    "AXIS",
    "STORAGES",
    "LONGEST",
    "OTHERS",
    "PRECISIONS",
    "Answer",
    "Generation",
    "GenerationPlan",
    "InputMaker",
    "RunPlan",
    "Training",
    "answer_file",
    "default_seq",
    "plan_run",
    "plan_within",
    "read_answer",
    "trace",
    "write_answer",
]
