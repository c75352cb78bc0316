"""Options of models that are served from files. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from charonia.config.parameters import is_free_path

WORKERS_MAX = 1024
BATCH_SIZE_MAX = 2**31 - 1
CONTEXT_MAX = 2**31 - 1


class Mount(NamedTuple):
    """An ASGI application beside the models.

    Attributes:
        path: Where it answers, such as "/ui".
        file: The file, "" for the only Python file that is served.
    """

    app: str
    path: str
    file: str = ""

    @property
    def name(self) -> str:
        """Name of what runs it among the models."""
        return self.path.strip("/").replace("/", "-")

    def socket(self, repository: str) -> str:
        """Return its socket, in the repository that is made for files."""
        return f"{repository}/.{self.name}.socket"


def read_mount(text: str) -> Mount:
    """Parse `[FILE.py:]APP:/PATH`. Raises ValueError: The text has another form."""
    head, _, path = text.rpartition(":")
    file, _, app = head.rpartition(":")
    if not app.isidentifier() or not is_free_path(path) or (file and not file.endswith(".py")):
        raise ValueError(f"expected [FILE.py:]APP:/PATH, with a path that the server does not have, got '{text}'")
    return Mount(app, path, file)


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How files are served that are given in place of a repository.

    Attributes:
        name: Name of the model of the only file, "" for that of the file.
        max_batch_size: Largest batch, 0 for what the model says.
        workers: Instances of each model, 0 for what the model says.
        trust: Whether estimators may run code while they are read.
        example: File with rows that an estimator takes, "" for none.
        model_name: Name of the model where a path is one model and no repository, "" for its own.
        predictor: The model of a repository that another server runs, "" for none.
        predictor_host: That server, "" for none.
        mounts: ASGI applications beside the models.
        ctx: Tokens of context of a GGUF file, 0 for the model's own.
        threads: Threads that compute it, 0 for those that are free.
        slots: Requests that are computed at the same time, 0 for the default.
        chat_template: Its chat template, or a file with it; "" for that of the file.
        gpu_layers: Layers on GPUs, -1 for as many as fit, None for the default.
    """

    name: str = ""
    max_batch_size: int = 0
    workers: int = 0
    trust: bool = False
    example: str = ""
    model_name: str = ""
    predictor: str = ""
    predictor_host: str = ""
    mounts: tuple[Mount, ...] = ()
    ctx: int = 0
    threads: int = 0
    slots: int = 0
    chat_template: str = ""
    gpu_layers: int | None = None

    def problems(self) -> Iterator[str]:
        for option, name in (("--name", self.name), ("--model_name", self.model_name)):
            if "/" in name or name.startswith("."):
                yield f"{option}: expected a name without '/' that does not begin with '.', got '{name}'"

        names = [mount.name for mount in self.mounts]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"--mount: expected one application at /{name}, got {names.count(name)}"
        if self.predictor and not self.predictor_host:
            yield "--predictor: --predictor_host HOST says which server runs it"

    @property
    def explicit(self) -> tuple[str, ...]:
        """The options that are set."""
        every = (
            ("--name", self.name),
            ("--max-batch-size", self.max_batch_size),
            ("--workers", self.workers),
            ("--trust", self.trust),
            ("--example", self.example),
        )
        return (*(name for name, value in every if value), *self.gguf)

    @property
    def gguf(self) -> dict[str, tuple[str, str]]:
        """The options of GGUF files that are set: parameter of the model and its value, by name."""
        every = {
            "--ctx": ("n_ctx", self.ctx),
            "--threads": ("n_threads", self.threads),
            "--slots": ("n_parallel", self.slots),
            "--chat-template": ("chat_template", self.chat_template),
            "--gpu-layers": ("n_gpu_layers", "" if self.gpu_layers is None else str(self.gpu_layers)),
        }
        return {option: (name, str(value)) for option, (name, value) in every.items() if value}
