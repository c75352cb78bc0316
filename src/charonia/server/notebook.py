"""An object or a function of a notebook as a model: `charonia.serve` in an interactive interpreter.

The server and the model are threads of this process, so the object need not be pickled, and later changes to it count.
"""

import atexit
import json
from dataclasses import replace
from textwrap import indent

from charonia.config.json_form import from_json
from charonia.config.pbtxt import render
from charonia.server.backends.python.worker import service
from charonia.server.backends.python.worker.function import Function
from charonia.server.backends.python.worker.model_config import ModelConfig
from charonia.server.backends.workers.model import MODE, THREAD
from charonia.server.embedding import Server
from charonia.server.machine.private_folder import PrivateFolder
from charonia.server.options import ModelOptions, ServerOptions
from charonia.wire.example_request import example_request

_served: dict[str, "Served"] = {}


class Served:
    """A model that this process serves, with its server.

    Attributes:
        name: Name of the model.
        url: Address of the server, `http://127.0.0.1:PORT`.
    """

    def __init__(self, definition: service.Definition) -> None:
        """Load the model and start the server. A model of this name that is served already is stopped first.

        Raises:
            ServingError: The model fails to load.
        """
        self.name = definition.name
        self.definition = definition
        given = ModelConfig({"name": self.name, "backend": "python"})
        Function(definition).complete(given)
        config = from_json(json.dumps(given.as_dict()))
        config = replace(config, parameters={**config.parameters, MODE: THREAD})
        if self.name in _served:
            _served[self.name].stop()
        self._folder = PrivateFolder()
        version = self._folder.path / self.name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(render(config), encoding="utf-8")
        (version / "model.py").write_text(f"from {__name__} import define\n\ndefine({self.name!r})\n", encoding="utf-8")
        options = ServerOptions(models=ModelOptions(auto_complete=False))
        self._server = Server(self._folder.path, http=True, grpc=True, options=options)
        _served[self.name] = self
        try:
            self._server.__enter__()
        except BaseException:
            self.stop()
            raise
        self.url = f"http://{self._server.http_url}"
        self._example = example_request(config, url=self.url).curl()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the server. May be called twice."""
        if _served.get(self.name) is self:
            del _served[self.name]
            self._server.__exit__(None, None, None)
            self._folder.remove()
            atexit.unregister(self.stop)

    def __repr__(self) -> str:
        state = self.url if _served.get(self.name) is self else "stopped"
        return f"{self.name}: {state}\n\n{indent(self._example, '    ')}"


def define(name: str) -> None:
    """Add the definition of a model to the file that is being imported for it."""
    service.define(_served[name].definition)
