"""The Python model that tries a forest's file, in a worker process that may die of it."""

import faulthandler
import resource
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from charonia.core.errors import ServingError, invalid
from charonia.server.backends.fil.options import ForestPlan
from charonia.server.backends.fil.probe import DAMAGED, NO_MEMORY, Probe


class TritonPythonModel:
    """A forest's file."""

    @staticmethod
    def auto_complete_config(question: Any) -> Any:
        """Answer the server's question what is wrong with a file; no configuration is completed here.

        The question has the fields of a `Probe`, and `memory_bytes`, the limit of what the process may take.
        """
        asked = question.as_dict()
        faulthandler.disable()  # where this file was when a library crashed is of no interest
        _limit(resource.RLIMIT_CORE, 0)
        limit = asked.pop("memory_bytes")
        _limit(resource.RLIMIT_DATA, limit)
        probe = Probe(**asked | {"path": Path(asked["path"]), "plan": ForestPlan(**asked["plan"])})
        try:
            probe.run()
        except (ServingError, MemoryError) as error:
            if isinstance(error, MemoryError) or NO_MEMORY in error.message:
                error = invalid(f"{probe.unreadable}: it takes more than {limit >> 20} MiB of memory", hint=DAMAGED)
            return pb_utils.ModelConfig({"code": error.code.value, "message": error.message, "hint": error.hint})
        return pb_utils.ModelConfig({})


def _limit(what: int, value: int) -> None:
    _, most = resource.getrlimit(what)
    resource.setrlimit(what, (value if most == resource.RLIM_INFINITY else min(value, most), most))
