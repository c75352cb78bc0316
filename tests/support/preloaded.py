"""Imported by the fork server alone, last: what its forks have besides the modules of commands."""

import gc

from tests.support import warm_start

warm_start.preload()
gc.collect()
gc.freeze()  # a fork's garbage collections neither look at these objects nor copy their pages
