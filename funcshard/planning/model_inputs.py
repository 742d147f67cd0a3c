"""The inputs of a model on the meta device, its loss, and its trace with them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from funcshard._utils.options import outline
from funcshard._utils.torch_private import asks_for_data
from funcshard._utils.tree import tensors_in
from funcshard.checkpoint import is_hugging_face
from funcshard.estimate import Profile, profile
from funcshard.module import make_functional
from funcshard.plan import MixedPrecision, Plan

LONGEST = 8192  # tokens of a sample by default, if the model takes so many
OTHERS = 1024  # tokens of a sample by default for a model without a context
SOUND = 160_000  # numbers of a sample by default for a model of sound waves: 10 s at 16 kHz

InputMaker = Callable[[int, int], Any]  # of batch and seq; returns a tuple or a dictionary

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


def default_seq(module: Any) -> int:
    """Return the context of a model, at most ``LONGEST``, or else ``OTHERS``."""
    if _takes_waves(module):
        return SOUND
    return min(context_of(module) or OTHERS, LONGEST)


def context_of(module: Any) -> int | None:
    """Return the most tokens that a model's config allows in its text part."""
    config = text_config(getattr(module, "config", None))
    for name in (
        "max_position_embeddings",
        "n_positions",
        "max_target_positions",
        "context",
    ):
        context = getattr(config, name, None)
        if isinstance(context, int) and context > 0:
            # Note: RoBERTa's table has two rows that are no positions.
            return context - 2 if context == 514 else context
    return None


def text_config(config: Any) -> Any:
    """Return a config's text part, or itself."""
    if hasattr(config, "get_text_config"):
        # Why: transformers raises it for two text parts, as of MusicGen.
        with contextlib.suppress(ValueError):
            return config.get_text_config()
    return config


def trace(
    module: nn.Module,
    batch: int,
    seq: int,
    *,
    precision: MixedPrecision | Plan | None,
    inputs: InputMaker | None = None,
    functional: tuple[Any, ...] | None = None,
) -> Profile:
    """Return the profile of a model with one batch.

    Arguments:
        module: the model.
        batch: number of samples.
        seq: tokens of a sample.
        precision: as in ``profile``.
        inputs: as in ``plan_run``.
        functional: what ``make_functional`` returned for the model, if you have it.

    Raises:
        ValueError: the model fails on these inputs.
    """
    apply, params, buffers = functional or make_functional(module)
    args, keywords = _model_inputs(module, batch, seq, inputs)
    try:
        return profile(apply, params, buffers, *args, precision=precision, **keywords)
    except Exception as error:  # of any kind: the model is the user's
        if isinstance(error.__cause__, Exception) and asks_for_data(error.__cause__):
            raise  # no other inputs and no other precision would help
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"the model failed on its inputs ({type(error).__name__}: {first_line}): pass inputs "
            "that it takes, or another precision"
        ) from error


def _model_inputs(
    module: nn.Module, batch: int, seq: int, inputs: InputMaker | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a model for ``profile``, with its loss."""
    if inputs is not None:
        with torch.device("meta"):
            user_inputs = inputs(batch, seq)
        if isinstance(user_inputs, Mapping):
            return (), {**user_inputs, "loss": _loss_of}
        if isinstance(user_inputs, tuple):
            return user_inputs, {"loss": _loss_of}
        raise TypeError(
            f"inputs must return a tuple or a dictionary; found {outline(user_inputs)}: put a "
            "single input in a tuple"
        )
    if is_hugging_face(module):
        return (), {**_hugging_face_inputs(module, batch, seq), "loss": _loss_of}
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    return (tokens,), {"loss": _cross_entropy, "targets": tokens}


def _hugging_face_inputs(module: nn.Module, batch: int, seq: int) -> dict[str, Any]:
    """Return a batch of a model of transformers, with the labels of its class.

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
    if "return_loss" in parameters:  # of two encoders
        inputs["return_loss"] = True
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    if "labels" in parameters and any(part in title for part in _TOKEN_LABELS):
        inputs["labels"] = tokens
    elif "labels" in parameters and any(part in title for part in _SAMPLE_LABELS):
        inputs["labels"] = tokens[:, 0]
    return inputs


def has_vision(config: Any) -> bool:
    """Return whether a model has a part for images and one for text."""
    return hasattr(config, "vision_config") and hasattr(config, "text_config")


def takes_text_alone(config: Any) -> bool:
    """Return whether such a model runs without images: decoders do, CLIP and its kin don't."""
    names = ("image_token_id", "image_token_index", "vision_feature_layer")
    return any(hasattr(config, name) for name in names)


def _cross_entropy(logits: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits ``[batch, seq, vocabulary]``."""
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != targets.shape:
        raise ValueError(
            "the model must return logits [batch, seq, vocabulary] for tokens of shape "
            f"{list(targets.shape)}; found {outline(logits)}: give inputs, and let the model "
            "return its loss"
        )
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def _takes_waves(module: Any) -> bool:
    is_sound = getattr(module, "main_input_name", "") == "input_values"
    return is_sound and not hasattr(module.config, "num_mel_bins")


def _main_input(module: Any, batch: int, seq: int) -> dict[str, Any]:
    config, name = module.config, module.main_input_name
    takes_tokens = "input_ids" in inspect.signature(module.forward).parameters
    inputs: dict[str, Any] = {}
    if takes_tokens:
        inputs["input_ids"] = torch.empty(batch, seq, dtype=torch.int64, device="meta")

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=torch.float32, device="meta")

    if has_vision(config) and not takes_text_alone(config):
        name = "pixel_values"
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        sides = (size, size) if isinstance(size, int) else tuple(size)
        frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
        inputs[name] = empty(*frames, getattr(vision, "num_channels", 3), *sides)
    elif name == "input_features" and hasattr(config, "max_source_positions"):
        # Note: Whisper's second convolution halves the frames.
        inputs[name] = empty(config.num_mel_bins, 2 * config.max_source_positions)
    elif _takes_waves(module):
        inputs[name] = empty(seq)
    elif name == "input_values":  # a spectrogram
        inputs[name] = empty(config.max_length, config.num_mel_bins)
    elif not takes_tokens:
        raise ValueError(
            f"plan_run knows inputs of tokens, images and sounds; found {type(module).__name__}, "
            f"whose main input is {name!r}: pass inputs="
        )
    return inputs


def _loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss among a model's outputs, or else the mean of the first output."""
    loss: torch.Tensor | None = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    first_output = tensors_in(outputs)[0]
    if first_output.ndim:
        first_output = first_output.float().mean()
    return first_output
