"""``python -m funcshard``: see ``python -m funcshard --help``."""
