"""What a run does with its model: ``Training`` or ``Generation``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils.options import check_choice, check_flag
from funcshard.estimate import OPTIMIZERS
from funcshard.plan import MixedPrecision
from funcshard.planning.adapters import STORAGES, check_lora
from funcshard.planning.model_inputs import InputMaker

# By name; bf16-params keeps the parameters in bfloat16 too.
PRECISIONS = {
    "bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp32": None,
    "bf16-params": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training run, for ``plan_run``.

    Attributes:
        precision: ``"bf16"`` computes in bfloat16 and keeps float32 parameters, ``"fp32"`` does
            both in float32, and ``"bf16-params"`` both in bfloat16.
        optimizer: name in ``funcshard.estimate.OPTIMIZERS``.
        lora: adapters to train in place of the weights, as ``{"r": 16, "targets": ["q_proj",
            "v_proj"]}``. Frozen weights are in bfloat16, unless ``precision`` is ``"fp32"``; with
            ``"base": "nf4"``, those of layers are stored in 4 bits, as in QLoRA.
        dpo: whether the model, a decoder, learns from preferences, beside a frozen reference in
            bfloat16; with ``lora``, the reference is the model without its adapters. A sample is a
            pair of answers then.
        inputs: function of batch and seq that returns the model's inputs, as a tuple or a
            dictionary. Models of transformers don't need it, and others do unless they take
            tokens and return logits. The loss is ``outputs.loss``, or the mean of the first output.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has a value that it can't have, or ``inputs`` is beside ``dpo``.

    Example:
        >>> import funcshard as fs
        >>> fs.Training(lora={"r": 16, "targets": ["q_proj"]}, dpo=True).title
        ' with LoRA and DPO'
    """

    precision: str = "bf16"
    optimizer: str = "adamw"
    lora: Mapping[str, Any] | None = None
    dpo: bool = False
    inputs: InputMaker | None = None

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, [*PRECISIONS])
        check_choice("optimizer", self.optimizer, [*OPTIMIZERS])
        check_flag("dpo", self.dpo)
        if self.lora is not None:
            check_lora(self.lora)
        if self.dpo and self.inputs is not None:
            raise ValueError(
                "dpo makes its inputs; found inputs too: leave out inputs or dpo"
            )

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all parameters, if it isn't the model's."""
        kept_low = self.lora is not None and self.precision == "bf16"
        return torch.bfloat16 if kept_low or self.precision == "bf16-params" else None

    @property
    def base(self) -> str | None:
        """How frozen weights are stored."""
        return (self.lora or {}).get("base")

    @property
    def title(self) -> str:
        """What makes the run special, as text."""
        parts = ["LoRA"] * (self.lora is not None) + ["DPO"] * self.dpo
        return " with " + " and ".join(parts) if parts else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Generation of text with a cache of keys and values, for ``plan_run``.

    Attributes:
        precision: dtype of weights and cache, ``"bf16"`` or ``"fp32"``; or ``"nf4"``, ``"int8"`` or
            ``"fp8"``, in which the weights of layers are stored, with all else in bfloat16.

    Raises:
        ValueError: ``precision`` is another.

    Example:
        >>> import funcshard as fs
        >>> fs.Generation(precision="int8").dtype
        torch.bfloat16
    """

    precision: str = "bf16"

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ["bf16", "fp32", *STORAGES])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters that aren't stored small."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def base(self) -> str | None:
        """How the weights of layers are stored."""
        return self.precision if self.precision in STORAGES else None
