"""The script of a worker process: makes its folder a package in `_charonia`, the folder `server`, and runs it.

A worker may lack the package charonia, and its model may have modules with the names of ours. So this folder is not on
`sys.path`, and the packages above it are created rather than imported. A process that a model spawns runs the same as
its `__mp_main__`, and finds what the worker has imported.
"""

import importlib
import os
import sys
import types

_PACKAGE = "_charonia.backends.python.worker"
_PB_UTILS = "triton_python_backend_utils"
_STUB = "c_python_backend_utils"
_FOLDER = os.path.dirname(os.path.realpath(__file__))


def _import_package() -> types.ModuleType:
    if sys.path and os.path.realpath(sys.path[0]) == _FOLDER:
        del sys.path[0]
    name, folder = _PACKAGE, _FOLDER
    while name:
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [folder]
        name, folder = name.rpartition(".")[0], os.path.dirname(folder)
    worker = importlib.import_module(_PACKAGE + ".main")
    sys.modules[_STUB] = sys.modules[_PB_UTILS] = sys.modules[f"{_PACKAGE}.{_PB_UTILS}"]
    return worker


_worker = _import_package()

if __name__ == "__main__":
    _worker.main()
