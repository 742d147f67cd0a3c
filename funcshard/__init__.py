"""Fully sharded data parallelism as pure functions."""

from funcshard import wrap
from funcshard.accumulate import accumulate
from funcshard.cast import Cast
from funcshard.checkpoint import Saving, restore, save
from funcshard.collectives import pmean, psum
from funcshard.contents import Contents, latest
from funcshard.delay import delayed
from funcshard.events import Event, record_events
from funcshard.functional import make_functional
from funcshard.init import init_module, init_shards
from funcshard.mesh import Mesh, init_mesh
from funcshard.module import fully_shard
from funcshard.muon import muon
from funcshard.norm import clip_by_global_norm, global_norm
from funcshard.optim import torch_optimizer
from funcshard.optimizer_state import optimizer_from_state_dict, optimizer_to_state_dict
from funcshard.owners import Owners, assign_owners
from funcshard.parts import PerRank
from funcshard.per_sample import per_sample_grad
from funcshard.plan import Plan
from funcshard.planner import make_plan
from funcshard.precision import MixedPrecision
from funcshard.predict import predict_events
from funcshard.remat import remat
from funcshard.replan import replan
from funcshard.safetensors import export_safetensors, import_safetensors
from funcshard.scaler import GradScaler
from funcshard.schedule import Schedule, make_schedule
from funcshard.shard import gather, shard
from funcshard.simulate import simulate
from funcshard.state import Piece, from_state_dict, to_state_dict
from funcshard.train import TrainState, make_train_step
from funcshard.transform import value_and_grad
from funcshard.unit import reshard, unshard

__version__ = "0.1.0"

__all__ = [
    "Cast",
    "Contents",
    "Event",
    "GradScaler",
    "Mesh",
    "MixedPrecision",
    "Owners",
    "Piece",
    "PerRank",
    "Plan",
    "Saving",
    "Schedule",
    "TrainState",
    "accumulate",
    "assign_owners",
    "clip_by_global_norm",
    "delayed",
    "export_safetensors",
    "from_state_dict",
    "fully_shard",
    "gather",
    "global_norm",
    "import_safetensors",
    "init_mesh",
    "init_module",
    "init_shards",
    "latest",
    "make_functional",
    "make_plan",
    "make_schedule",
    "make_train_step",
    "per_sample_grad",
    "muon",
    "optimizer_from_state_dict",
    "optimizer_to_state_dict",
    "pmean",
    "predict_events",
    "psum",
    "record_events",
    "remat",
    "replan",
    "reshard",
    "restore",
    "save",
    "shard",
    "simulate",
    "to_state_dict",
    "torch_optimizer",
    "unshard",
    "value_and_grad",
    "wrap",
]
