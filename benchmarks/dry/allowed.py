"""The waits of the host that the library may do, with the reason of each."""

from __future__ import annotations

from typing import NamedTuple


class Allowed(NamedTuple):
    """A wait of the host that may be.

    Attributes:
        what: the kinds of waits, such as ``"item"``.
        in_step: whether it may be in a step, and not only before or after one.
        answer: the value that the host gets in a dry run, in which no tensor has values.
    """

    what: tuple[str, ...]
    why: str
    in_step: bool = False
    answer: float = 0.0


_TO_CUDA, _TO_CPU, _ITEM = ("copy from cpu to cuda",), ("copy from cuda to cpu",), ("item",)

# By file and function of the library.
ALLOWED: dict[str, Allowed] = {
    "core/buffer_comm.py:wait": Allowed(
        ("synchronize",),
        "offload: the optimizer reads gradients on the CPU and writes to shards when backward returns",
        in_step=True,
    ),
    "core/sharding.py:put": Allowed(
        _TO_CPU + _TO_CUDA, "shards are made once, of leaves that may be elsewhere, and on the CPU with offload"
    ),
    "core/checksum.py:compare": Allowed(_TO_CUDA + _ITEM, "ranks compare checksums of their leaves, before the first step"),
    "graph/traced.py:__call__": Allowed(_TO_CPU + _TO_CUDA + _ITEM, "the waits of the recorded step", answer=1.0),
    "graph/compiling.py:__call__": Allowed(_TO_CPU + _TO_CUDA, "the waits of the recorded step"),
    "_utils/torch_compilers.py:boxed": Allowed(_TO_CPU + _TO_CUDA, "the waits of the recorded step"),
    "checkpoint/unflatten_state.py:_tensor": Allowed(("equal",), "leaves must agree on a value of their buffer", answer=1.0),
    "checkpoint/flatten_state.py:_checksum": Allowed(_TO_CPU, "ranks compare checksums of a state, before they save it"),
    "checkpoint/rank_files.py:read": Allowed(_TO_CUDA, "a checkpoint is read to the CPU"),
    "checkpoint/unflatten_state.py:read": Allowed(_TO_CUDA + _TO_CPU, "replan moves what is offloaded"),
    "checkpoint/resharding.py:copy_run": Allowed(_TO_CUDA, "slices of other ranks are read to the CPU"),
    "checkpoint/rank_files.py:_write_tensor": Allowed(_TO_CPU, "a checkpoint is written from the CPU, by another thread"),
    "checkpoint/save_restore.py:_copied": Allowed(_TO_CPU, "the state is copied before training goes on"),
    "checkpoint/save_restore.py:_agree": Allowed(_ITEM + _TO_CUDA, "ranks agree on the name of the folder that they write"),
    "checkpoint/state_dict.py:kept_copy": Allowed(_TO_CPU, "offload=True asks for a state dict on the CPU"),
    "module/resets.py:is_blank": Allowed(_ITEM, "an initialisation that leaves a leaf out is an error, which Python raises"),
    "train/train_step.py:__call__": Allowed(
        _ITEM, "scaler: Python decides whether the optimizer runs, as torch.amp.GradScaler does", in_step=True
    ),
    "train/train_step.py:_has_data": Allowed(
        _ITEM, "weighted: Python decides whether any rank had data", in_step=True, answer=1.0
    ),
    "train/train_step.py:_first_rank_with": Allowed(
        _ITEM, "weighted and mutable: Python names the rank that broadcasts the buffers", in_step=True
    ),
    "train/scaler.py:<dictcomp>": Allowed(_TO_CPU, "offload: gradients on the CPU are unscaled there", in_step=True),
    "train/scaler.py:unscale": Allowed(_TO_CUDA, "offload: ranks learn of infinities on the CPU", in_step=True),
    "core/gradients.py:divisor_on": Allowed(_TO_CPU, "offload: gradients on the CPU are divided there", in_step=True),
    "train/matrix_step.py:_parts": Allowed(_TO_CUDA, "offload: owners compute on the device", in_step=True),
    "train/matrix_step.py:updates": Allowed(_TO_CPU, "offload: owners compute on the device", in_step=True),
    "train/muon_step.py:_update_momentum": Allowed(_TO_CUDA, "offload: muon computes on the device", in_step=True),
    "train/clipping.py:<listcomp>": Allowed(_TO_CUDA, "offload: the norm on the CPU joins that of the device", in_step=True),
    "train/clipping.py:<dictcomp>": Allowed(_TO_CPU, "offload: gradients on the CPU are scaled there", in_step=True),
    "steps.py:__init__": Allowed(_TO_CUDA, "nn.BatchNorm1d makes its counter of batches on the CPU"),
    "train/per_sample.py:run": Allowed(
        _ITEM, "the number of samples of all ranks divides the sums", in_step=True, answer=1.0
    ),
}
