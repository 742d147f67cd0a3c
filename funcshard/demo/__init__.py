"""The demonstration: ``python -m funcshard train`` trains a byte-level GPT on the source of Python.

Read in this order:

- ``gpt``, ``corpus``: the model, in plain PyTorch, and its text.
- ``train``: the job of one rank, with validation loss and samples of text.
- ``launch``: rank processes, torchrun and Ctrl-C.
- ``display``: progress bars.
- ``arguments``, ``plan_command``, ``calibrate_command``: the command line.
- ``decoders``: published models, and their sizes.
"""

from __future__ import annotations

from funcshard.demo.decoders import (
    DECODERS,
    Decoder,
    DecoderConfig,
    ExpertSizes,
    LatentSizes,
    decoder,
)

__all__ = ["DECODERS", "Decoder", "DecoderConfig", "ExpertSizes", "LatentSizes", "decoder"]
