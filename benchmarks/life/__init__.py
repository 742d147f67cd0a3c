"""Race all that a job does besides its steps (``python -m benchmarks.life``), against its peers.

A row of the table is a ``Case`` (``case``) of one of the files that ``racing.FILES`` names. ``racing``
runs the rank processes: one a rank, with gloo and one thread each. Both sides of a case live in them and
take turns, round after round, and go first in alternation. A turn prepares what it needs, and then times
the one thing that its row names; all ranks meet before and after that. A ratio is that of the two
medians, with the quartiles of the ratios within each round. Beside it is the ratio of processor time,
summed over ranks, which other work on the machine disturbs less. Where results can be compared, turns
return a fingerprint, and fingerprints have to agree.

A fresh case runs every turn in new processes that have imported torch alone, because its row is
about what happens once in a process. A row of bytes measures the peak of resident memory in new
processes, after a tiny turn has loaded the code.
"""
