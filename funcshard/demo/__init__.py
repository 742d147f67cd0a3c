"""The demonstration: a byte-level GPT that trains on the source of Python itself."""
