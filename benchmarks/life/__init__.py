"""Race all that a job does besides its steps (``python -m benchmarks.life``), against its peers.

A row of the table is a ``Case``: one thing that funcshard and a peer both do, such as saving a
checkpoint. The files, in reading order:

- ``case``: ``Case``, and ``Place``, which tells a rank where it runs and times what it does;
- ``rows``: the list of all cases, from the files that define them;
- ``racing``: the rank processes, in which both sides take turns, round after round;
- ``report``: the table, with medians, ratios and goals;
- ``start``, ``building``, ``states`` and the other files that ``rows`` names: the cases.

Both sides of a case live in the same processes: one a rank, with gloo and one thread each. In every
round each side takes one turn, and the sides go first in alternation. A turn prepares what it needs,
and then times the one thing that its row names; all ranks meet before and after that. A ratio is
that of the two medians, with the quartiles of the ratios within each round. Beside it stands the
ratio of processor time, summed over ranks, which other work on the machine disturbs less. Where
results can be compared, turns return a fingerprint, and fingerprints have to agree.

A fresh case runs every turn in new processes that have imported torch alone, because its row is
about what happens once in a process. A row of bytes measures the peak of resident memory in new
processes, after a tiny turn has loaded the code.
"""
