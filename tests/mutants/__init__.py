"""Planted faults: what the tests catch. ``python -m tests.mutants --help`` says how to use it."""
