"""The script of a worker process: makes its folder the package `_charonia_worker`, and runs that.

A worker may lack the package charonia, and its model may have modules with the names of ours. So this folder is not on
`sys.path`. A process that a model spawns runs the same as its `__mp_main__`, and finds what the worker has imported.
"""

import importlib
import os
import sys
import types

_PACKAGE = "_charonia_worker"
_PB_UTILS = "triton_python_backend_utils"
_STUB = "c_python_backend_utils"
_FOLDER = os.path.dirname(os.path.realpath(__file__))


def _import_package() -> types.ModuleType:
    if sys.path and os.path.realpath(sys.path[0]) == _FOLDER:
        del sys.path[0]
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [_FOLDER]
    sys.modules[_PACKAGE] = package
    worker = importlib.import_module(_PACKAGE + ".main")
    sys.modules[_STUB] = sys.modules[_PB_UTILS] = sys.modules[f"{_PACKAGE}.{_PB_UTILS}"]
    return worker


_worker = _import_package()

if __name__ == "__main__":
    _worker.main()
