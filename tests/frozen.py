"""Import this last in a process that others are forked from: they then leave its objects alone.

Else each full collection of garbage in a forked process reads and copies the memory of all modules.
"""

import gc

from tests.ranks import COLLECTED_AFTER

gc.collect()
gc.freeze()
gc.set_threshold(*COLLECTED_AFTER)
