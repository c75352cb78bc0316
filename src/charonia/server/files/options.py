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
        model_name: Name of the model where a path is one model and no repository, "" for its own.
        predictor: The model of a repository that another server runs, "" for none.
        predictor_host: That server, "" for none.
    """

    name: str = ""
    max_batch_size: int = 0
    workers: int = 0
    trust: bool = False
    model_name: str = ""
    predictor: str = ""
    predictor_host: str = ""

    def problems(self) -> Iterator[str]:
        for option, name in (("--name", self.name), ("--model_name", self.model_name)):
            if "/" in name or name.startswith("."):
                yield f"{option}: expected a name without '/' that does not begin with '.', got '{name}'"

        if self.predictor and not self.predictor_host:
            yield "--predictor: --predictor_host HOST says which server runs it"

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
