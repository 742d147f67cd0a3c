"""The demonstration: ``python -m funcshard train`` trains a byte-level GPT on the source of Python.

Read in this order:

- ``gpt``: the model, in plain PyTorch.
- ``corpus``: the text, split into training and validation bytes.
- ``train``: the job of one rank: train, validate, sample and save.
- ``evaluate``: validation loss and text samples.
- ``launch``: rank processes, torchrun, and Ctrl-C. ``machine_limits``: how many processes fit.
- ``display``: progress bars and coloured text.
- ``arguments``, ``plan_command``, ``calibrate_command``: the command line.

``decoder_configs`` has the sizes of published models. ``decoders`` builds those that are no GPT.
"""

from __future__ import annotations

from funcshard.demo.decoder_configs import DECODERS, DecoderConfig, ExpertSizes, LatentSizes
from funcshard.demo.decoders import Decoder, decoder

__all__ = ["DECODERS", "Decoder", "DecoderConfig", "ExpertSizes", "LatentSizes", "decoder"]
