"""The demonstration: ``python -m funcshard train`` trains a byte-level GPT on the source of Python.

Read in this order:

- ``gpt``, ``corpus``: the model, in plain PyTorch, and its text.
- ``train``, ``evaluate``: the job of one rank; validation loss and samples of text.
- ``launch``, ``machine_limits``: rank processes, torchrun and Ctrl-C; how many processes fit.
- ``display``: progress bars and coloured text.
- ``arguments``, ``plan_command``, ``calibrate_command``: the command line.
- ``decoder_configs``, ``decoders``: published models that are no GPT.
"""

from __future__ import annotations

from funcshard.demo.decoder_configs import DECODERS, DecoderConfig, ExpertSizes, LatentSizes
from funcshard.demo.decoders import Decoder, decoder

__all__ = ["DECODERS", "Decoder", "DecoderConfig", "ExpertSizes", "LatentSizes", "decoder"]
