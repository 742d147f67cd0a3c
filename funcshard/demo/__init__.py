"""The demonstration: ``python -m funcshard train`` trains a byte-level GPT on the source of Python.

Read in this order:

- ``gpt``: the model, in plain PyTorch.
- ``corpus``: the text, split into training and validation bytes.
- ``train``: the job of one rank: train, validate, sample and save.
- ``evaluate``: validation loss and text samples.
- ``launch``: rank processes, torchrun, and Ctrl-C.
- ``display``: progress bars and coloured text.
"""
