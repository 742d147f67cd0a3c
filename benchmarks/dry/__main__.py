"""``python -m benchmarks.dry``."""

import sys

from benchmarks.dry.running import main

sys.exit(main())
