"""A run's task as one module: a decoder that generates, and a policy with its reference."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from funcshard.planning.adapters import without_adapters

BETA = 0.1
SCRIPT = """# Train from preferences as examples/dpo.py does, with these units and this recomputation.
# With adapters, the reference is the same model, called without them.
units = {units}
remat = {remat}
"""


# --- generation -----------------------------------------------------------------------------------


class CachedModel(nn.Module):
    """One pass of a decoder that generates, for a trace.

    The pass has no cache, whose tensors grow from pass to pass: ``cache_bytes`` counts them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.last_alone = _last_alone(model)
        # Why a parameter: a trace ends with a loss that depends on one.
        self.scale = nn.Parameter(torch.empty((), dtype=torch.float32, device="meta"))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return a loss of the next token's logits."""
        with torch.no_grad():
            out = self.model(input_ids=input_ids, use_cache=False, **self.last_alone)
        return self.scale * out.logits[:, -1].float().sum()


def prompts(batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Return the tokens of one pass."""
    return {"input_ids": torch.empty(batch, seq, dtype=torch.int64, device="meta")}


def cache_bytes(model: Any, seq: int) -> int:
    """Return the bytes that the cache of transformers holds for one sample of ``seq`` tokens.

    Raises:
        ValueError: the model returns no cache, or fails on tokens alone.
    """
    try:
        with torch.no_grad():
            out = model(**prompts(1, seq), use_cache=True, **_last_alone(model))
        cache = next(
            out[name]
            for name in ("past_key_values", "cache_params")
            if out.get(name) is not None
        )
    except Exception as error:  # of any kind: the model may be the user's
        raise ValueError(
            f"generation needs a model that returns a cache of its keys and values; found "
            f"{type(model).__name__} ({type(error).__name__}): plan its training alone"
        ) from error
    return sum(tensor.nbytes for tensor in _tensors(cache))


def _last_alone(model: Any) -> dict[str, int]:
    """Return the option of transformers for logits of the last token alone, if there is one."""
    name = "logits_to_keep"
    return {name: 1} if name in inspect.signature(model.forward).parameters else {}


def _tensors(cache: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache, whose layers are objects of many classes."""
    if isinstance(cache, torch.Tensor):
        yield cache
    elif isinstance(cache, dict):
        yield from _tensors(list(cache.values()))
    elif isinstance(cache, list | tuple):
        for item in cache:
            yield from _tensors(item)
    elif type(cache).__module__.startswith("transformers."):
        yield from _tensors(vars(cache))


# --- DPO ------------------------------------------------------------------------------------------


class Preferences(nn.Module):
    """A policy and its frozen reference; ``forward`` returns the loss of DPO.

    Source: Rafailov et al., "Direct preference optimization", 2023.
    """

    def __init__(
        self, policy: nn.Module, dtype: torch.dtype | None, *, adapters: bool
    ) -> None:
        """Take a policy, and copy it unless it has adapters.

        Arguments:
            policy: the model.
            dtype: the dtype of the reference; ``None``: that of the policy.
            adapters: whether the policy has adapters; without them, it's the reference.
        """
        super().__init__()
        self.policy = policy
        self.reference = None
        if not adapters:
            self.reference = copy.deepcopy(policy).requires_grad_(False).to(dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the loss for chosen answers and as many rejected ones, in this order."""
        with torch.no_grad():
            if self.reference is None:
                with without_adapters(self.policy):
                    before = _log_probs(self.policy, input_ids)
            else:
                before = _log_probs(self.reference, input_ids)
        chosen, rejected = (_log_probs(self.policy, input_ids) - before).chunk(2)
        return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def pairs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Return pairs of answers, each of ``seq`` tokens with its prompt."""
    return {"input_ids": torch.empty(2 * batch, seq, dtype=torch.int64, device="meta")}


def _log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))
