"""Ray puts a folder of its own modules on the path; the commands that other tests fork from here do not have it."""

import sys

_path = list(sys.path)
import ray  # noqa: E402, F401

sys.path[:] = _path
