"""From a loss function and an optimizer to a training step.

Read the files in this order:

- ``train_step``: ``make_train_step``, which calls all below.
- ``train_state``: ``TrainState``, the state between two steps, and its copies.
- ``attempting``: ``attempt``, a step that may fail on some ranks.
- ``metering``: ``make_meter``, the numbers of a step for a log.
- ``clipping``: ``global_norm`` and ``clip_by_global_norm`` of sharded gradients.
- ``scaler``: ``GradScaler``, loss scaling for float16.
- ``learning_rate``: ``torch_schedule``, a scheduler of torch as a function of the step.
- ``optimizers``: an optimizer as a pair of pure functions; ``torch_optimizer``, and its options.
- ``optimizer_step``: one update of shards; whether a state fits an optimizer; donation of a state.
- ``quasi_newton``: ``lbfgs``, ``torch.optim.LBFGS`` on shards.
- ``param_groups``: the ranges of flat shards that parameter groups occupy.
- ``matrix_step``: ``per_matrix``, an optimizer written for one whole matrix.
- ``muon_step``: ``muon``, the optimizer that updates whole matrices.
- ``matrix_owners``: ``assign_owners``, which rank computes the update of which matrix.
- ``per_sample``: ``per_sample_grad`` and ``per_sample_norms``, of single samples.
"""

from __future__ import annotations

from funcshard.train.attempting import attempt
from funcshard.train.clipping import clip_by_global_norm, global_norm
from funcshard.train.learning_rate import torch_schedule
from funcshard.train.matrix_owners import Matrix, Owners, assign_owners
from funcshard.train.matrix_step import PerMatrixStep, per_matrix
from funcshard.train.metering import make_meter
from funcshard.train.muon_step import MuonStep, muon
from funcshard.train.optimizer_step import (
    DONATED_STATE,
    TorchOptimizer,
    TorchStep,
    check_not_donated,
    donate,
    is_donated,
)
from funcshard.train.optimizers import check_optimizer, torch_optimizer
from funcshard.train.param_groups import ParamGroupLayout
from funcshard.train.per_sample import per_sample_grad, per_sample_norms
from funcshard.train.quasi_newton import lbfgs
from funcshard.train.scaler import GradScaler, ScalerState
from funcshard.train.train_state import TrainState, copy
from funcshard.train.train_step import TrainStep, make_train_step

__all__ = [
    "DONATED_STATE",
    "GradScaler",
    "Matrix",
    "MuonStep",
    "Owners",
    "ParamGroupLayout",
    "PerMatrixStep",
    "ScalerState",
    "TorchOptimizer",
    "TorchStep",
    "TrainState",
    "TrainStep",
    "assign_owners",
    "attempt",
    "check_not_donated",
    "check_optimizer",
    "clip_by_global_norm",
    "copy",
    "donate",
    "global_norm",
    "is_donated",
    "lbfgs",
    "make_meter",
    "make_train_step",
    "muon",
    "per_matrix",
    "per_sample_grad",
    "per_sample_norms",
    "torch_optimizer",
    "torch_schedule",
]
