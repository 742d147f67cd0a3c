"""From a loss to a training step.

- ``optimizers``: ``torch_optimizer``, param_groups.
- ``muon_step``: ``muon``.
- ``clipping``: ``global_norm``, ``clip_by_global_norm``.
- ``scaler``: ``GradScaler``.
- ``per_sample``: ``per_sample_grad``.
- ``train_step``: ``make_train_step``.
"""

from __future__ import annotations

from funcshard.train.clipping import clip_by_global_norm, global_norm
from funcshard.train.muon_step import MuonStep, Owners, assign_owners, muon
from funcshard.train.optimizers import Layout, TorchOptimizer, TorchStep, torch_optimizer, trainable
from funcshard.train.per_sample import per_sample_grad
from funcshard.train.scaler import GradScaler, ScalerState
from funcshard.train.train_step import TrainState, make_train_step

__all__ = [
    "GradScaler",
    "Layout",
    "MuonStep",
    "Owners",
    "ScalerState",
    "TorchOptimizer",
    "TorchStep",
    "TrainState",
    "assign_owners",
    "clip_by_global_norm",
    "global_norm",
    "make_train_step",
    "muon",
    "per_sample_grad",
    "torch_optimizer",
    "trainable",
]
