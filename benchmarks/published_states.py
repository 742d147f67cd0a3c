"""Model states that ZeRO's paper and DeepSpeed's estimator publish, computed from plans."""

from __future__ import annotations

import re
from typing import Any

import torch

import funcshard as fs

__all__ = ["deepspeed_bytes", "zero_bytes"]

T5_EMBEDDING = 32_128 * 1024  # vocabulary and width in config.json of huggingface.co/google-t5/t5-3b


def zero_bytes(row: dict[str, Any]) -> int:
    """Return the model states of a row of ZeRO's Table 1, in bytes, from a plan.

    Parameters and gradients are float16. The optimizer has float32 copies of the parameters and two
    moments, 12 bytes for each parameter. A stage cuts the optimizer's states, the gradients too, or
    the parameters too.

    Arguments:
        row: the row; its ``notes`` begin with the stage.

    Source: §3 of https://arxiv.org/abs/1910.02054
    """
    leaf = torch.empty(row["params"], dtype=torch.float16, device="meta")
    plan = fs.make_plan({"model": leaf}, row["n_gpus"], units=["model"])
    (buffer,) = plan.units["model"].buffers
    whole, shard = buffer.numel, buffer.shard_numel
    stage = row["notes"].partition(":")[0].count("+")  # P_os, P_os+g, P_os+g+p
    params, grads = (shard if stage == 2 else whole), (shard if stage else whole)
    return 2 * params + 2 * grads + 12 * shard


def deepspeed_bytes(row: dict[str, Any]) -> int:
    """Return the model states on the device that DeepSpeed's estimator gives for ZeRO-3.

    Beside its shards, the device holds the largest layer with its gradients, both in two bytes.
    Offloaded optimizer states take 16 bytes of a parameter to the host, and offloaded parameters
    the other two.

    Arguments:
        row: the row; its ``notes`` say what is offloaded, and the size of the largest layer.

    Source: ``estimate_zero3_model_states_mem_needs`` of DeepSpeed
    """
    notes = row["notes"]
    millions = re.search(r"largest layer (\d+)M", notes)
    assert millions is not None, "each of the three rows names its largest layer"
    largest = T5_EMBEDDING  # printed without what is left of a million
    assert largest // 10**6 == int(millions[1]), "the rows are those of t5-3b"
    leaves = {
        "largest": torch.empty(largest, dtype=torch.float16, device="meta"),
        "rest": torch.empty(row["params"] - largest, dtype=torch.float16, device="meta"),
    }
    plan = fs.make_plan(leaves, row["n_gpus"], units=["largest"])
    shards = sum(buffer.shard_numel for unit in plan.unit_list for buffer in unit.buffers)
    gathered = sum(buffer.padded_numel for buffer in plan.units["largest"].buffers)
    each = 0 if "params and optimizer" in notes else 2 if "offload optimizer" in notes else 18
    return 4 * gathered + each * shards
