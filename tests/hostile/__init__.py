"""The hostile campaign: seeded rounds of kills, stops, damaged files and misuse.

``python -m pytest tests/hostile -m hostile --nightly`` runs a short part of each campaign, and
``--hostile-rounds full`` all of it; docs/reliability.md says what each campaign proves. The tests of
the helpers themselves are in tests/test_hostile.py.

- ``campaign``: runs the rounds of a campaign, each with its own seed, and prints how to repeat one;
- ``nursery``: processes that are ranks, the bound on their end, and what they must not leave;
- ``blame``: tells errors of this library from others;
- ``pauses``: stops processes for a while;
- ``training``: a small job whose state at every step is known;
- ``damage``: damages files;
- ``namespaces``: a disk, or a network, of a process's own.
"""
