"""Options of models that are served from files. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

WORKERS_MAX = 1024
BATCH_SIZE_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How files are served that are given in place of a repository.

    Attributes:
        name: Name of the model of the only file, "" for that of the file.
        max_batch_size: Largest batch, 0 for what the model says.
        workers: Instances of each model, 0 for what the model says.
        trust: Whether estimators may run code while they are read.
    """

    name: str = ""
    max_batch_size: int = 0
    workers: int = 0
    trust: bool = False

    def problems(self) -> Iterator[str]:
        """Yield what is wrong."""
        if "/" in self.name or self.name.startswith("."):
            yield f"--name: expected a name without '/' that does not begin with '.', got '{self.name}'"

    @property
    def given(self) -> tuple[str, ...]:
        """The options that are set."""
        every = (
            ("--name", self.name),
            ("--max-batch-size", self.max_batch_size),
            ("--workers", self.workers),
            ("--trust", self.trust),
        )
        return tuple(name for name, value in every if value)
