"""The inputs of a model of transformers, on the meta device, and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from funcshard._utils.options import outline
from funcshard._utils.tensors import tensors_in

LONGEST = 8192  # tokens of a sample by default, if the model takes so many
OTHERS = 1024  # tokens of a sample by default for a model without a context

# Parts of class names, by what one label is of.
_TOKEN_LABELS = (
    "CausalLM",
    "LMHead",
    "MaskedLM",
    "TokenClassification",
    "ConditionalGeneration",
    "DoubleHeads",
)
_SAMPLE_LABELS = (
    "SequenceClassification",
    "ImageClassification",
    "VideoClassification",
    "AudioClassification",
)


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One batch of a model, and how the loss follows from its outputs.

    Attributes:
        args: the positional inputs.
        kwargs: the inputs by name.
        loss: a function of the outputs, and of ``targets`` unless they're ``None``.
        targets: the second argument of ``loss``.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Any = None
    targets: Any = None


def default_seq(config: Any) -> int:
    """Return the context of a model's text part, at most ``LONGEST``."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_target_positions", "context"):
        context = getattr(text_config, name, None)
        if isinstance(context, int) and context > 0:
            # Note: RoBERTa's table has two rows that are no positions.
            return min(context - 2 if context == 514 else context, LONGEST)
    return OTHERS


def hugging_face_inputs(module: nn.Module, batch: int, seq: int) -> ModelInputs:
    """Return a batch of a model of transformers, with the labels of its class.

    A class whose labels are no tensor has the mean of its first output as its loss.

    Arguments:
        module: the model.
        batch: number of samples.
        seq: tokens of a sample; images and sounds have the size that the config says.

    Raises:
        ValueError: the main input is none of tokens, images and sounds.
    """
    config: Any = module.config
    parameters = inspect.signature(module.forward).parameters
    inputs = _main_input(module, batch, seq)
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    title = type(module).__name__
    encodes_first = bool(getattr(config, "is_encoder_decoder", False))
    if "input_features" in inputs and encodes_first:
        tokens = tokens[:, : getattr(config, "max_target_positions", seq)]
    if encodes_first and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = tokens
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    if "labels" in parameters and any(part in title for part in _TOKEN_LABELS):
        inputs["labels"] = tokens
    elif "labels" in parameters and any(part in title for part in _SAMPLE_LABELS):
        inputs["labels"] = tokens[:, 0]
    return ModelInputs((), inputs, loss=loss_of)


def token_inputs(batch: int, seq: int) -> ModelInputs:
    """Return tokens, for a model that returns logits, with cross entropy as the loss."""
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    return ModelInputs((tokens,), {}, loss=cross_entropy, targets=tokens)


def cross_entropy(logits: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits ``[batch, seq, vocabulary]``."""
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != targets.shape:
        raise ValueError(
            "the model must return logits [batch, seq, vocabulary] for tokens of shape "
            f"{list(targets.shape)}; found {outline(logits)}: give --inputs, and let the model "
            "return its loss"
        )
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def _main_input(module: Any, batch: int, seq: int) -> dict[str, Any]:
    config, name = module.config, module.main_input_name
    takes_tokens = "input_ids" in inspect.signature(module.forward).parameters
    inputs: dict[str, Any] = {}
    if takes_tokens:
        inputs["input_ids"] = torch.empty(batch, seq, dtype=torch.int64, device="meta")

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=torch.float32, device="meta")

    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        sides = (size, size) if isinstance(size, int) else tuple(size)
        frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
        inputs[name] = empty(*frames, getattr(vision, "num_channels", 3), *sides)
    elif name == "input_features" and hasattr(config, "max_source_positions"):
        # Note: Whisper's second convolution halves the frames.
        inputs[name] = empty(config.num_mel_bins, 2 * config.max_source_positions)
    elif name == "input_values":
        inputs[name] = empty(seq)
    elif not takes_tokens:
        raise ValueError(
            f"plan_run knows inputs of tokens, images and sounds; found {type(module).__name__}, "
            f"whose main input is {name!r}: pass inputs="
        )
    return inputs


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss among a model's outputs, or else the mean of the first output."""
    loss: torch.Tensor | None = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    first_output = next(tensors_in(outputs))
    return first_output.float().mean() if first_output.ndim else first_output
