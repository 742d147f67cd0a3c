"""The time of published training loops beside the operations that ``fs.profile`` traces.

Two things take time in llm-foundry's runs of 2023 and are no part of its models:

- The loop computes two metrics of the logits in each micro-batch, after backward: each of them casts
  the logits to float32 and takes their log-softmax. Source: ``Trainer._eval_train_metrics`` of
  https://github.com/mosaicml/composer (28cc4ca) and ``use_train_metrics`` of ``modeling_mpt.py`` in
  https://github.com/mosaicml/llm-foundry (3e5b960).
- Attention is a Triton kernel, the default of ``scripts/train/benchmarking/submit_benchmarks.py`` in
  the commits that wrote the tables (b2a43a1, 5e85bd6). It is slower than the matrix products of the
  same run, on H100s most of all. ``published_attention.json`` holds how fast it is beside them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from funcshard.demo import DECODERS
from funcshard.estimate import Hardware

if TYPE_CHECKING:  # that file needs this one
    from benchmarks.published_cases import Case

__all__ = ["SHARES", "attention_flops", "loop_seconds", "metric_bytes", "shares"]

SHARES = Path(__file__).with_name("published_attention.json")
_CAST, _LOG_SOFTMAX = 2 + 4, 4 + 4  # bytes read and written for each logit
_METRICS = 2


def metric_bytes(case: Case) -> int:
    """Return the bytes that the metrics of one micro-batch read and write."""
    logits = case.batch * case.length * DECODERS[case.model].vocabulary
    return _METRICS * (_CAST + _LOG_SOFTMAX) * logits if _foundry(case) else 0


def attention_flops(case: Case) -> int:
    """Return the FLOPs of Triton's attention in one micro-batch, counted as torch counts them.

    torch counts two products forward and five backward, as if no token were masked.
    """
    if not _foundry(case):
        return 0
    config = DECODERS[case.model]
    product = 2 * case.batch * config.layers * config.heads * config.head_dim * case.length**2
    return product * (2 * (1 + (case.checkpoints == "full")) + 5)


def loop_seconds(case: Case, machine: Hardware) -> float:
    """Return the seconds that one micro-batch takes beside what the profile holds."""
    moving = metric_bytes(case) / (machine.memory_bandwidth * machine.memory_efficiency)
    products = attention_flops(case) / (machine.flops["bfloat16"] * machine.flops_efficiency)
    return moving + products * (1 / shares().get(case.hardware, 1.0) - 1)


@functools.lru_cache(maxsize=1)
def shares() -> Mapping[str, float]:
    """Return how fast Triton's attention is beside matrix products, by the hardware's name."""
    found: dict[str, float] = json.loads(SHARES.read_text(encoding="utf-8"))["share"]
    return found


def _foundry(case: Case) -> bool:
    return "llm-foundry" in case.row["source"]
