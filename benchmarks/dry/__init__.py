"""Dry runs: the library on fake CUDA tensors, on a machine without a GPU (``python -m benchmarks.dry``).

Files, in reading order:

- ``device``: lets a CPU build of torch hold fake tensors of device "cuda", and differentiate them.
- ``mode``: ``DryCuda``, the mode around a dry run, which finds waits of the host.
- ``allowed``: the waits that the library may do, with their reasons.
- ``stream_order``: ``StreamOrder``, which finds accesses of streams that nothing orders.
- ``faults``: mistakes that are planted, and that a dry run must find.
- ``steps``, ``programs``, ``cases``: the programs that run dry.
"""
