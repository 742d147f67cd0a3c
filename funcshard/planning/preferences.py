"""A language model that learns from preferences, with its reference: DPO as one module."""

from __future__ import annotations

import copy
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


class Preferences(nn.Module):
    """A policy and its frozen reference; ``forward`` returns the loss of DPO.

    Source: Rafailov et al., "Direct preference optimization", 2023.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype | None, *, adapters: bool) -> None:
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
