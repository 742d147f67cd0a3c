"""Races between funcshard and its peers, in one run on one machine (``python -m benchmarks.step``)."""
