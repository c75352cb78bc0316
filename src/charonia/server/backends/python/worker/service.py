"""The API of service files: plain functions, classes and objects as models.

A decorated function stays the function that it was. While a file is imported for a server, `collecting` gathers what it
defines. What a definition means for a server is in `signature` and `functions`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypedDict, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any, Protocol

    from typing_extensions import Unpack

    from ....channel.datatypes import Array

    class Caller(Protocol):
        """What calls other models for the model that runs."""

        def call(self, model: str, inputs: Mapping[str, object]) -> dict[str, Array]:
            """Call a model and wait."""

        async def call_async(self, model: str, inputs: Mapping[str, object]) -> dict[str, Array]:
            """Call a model."""


__all__ = ["BadRequest", "Request", "Response", "Shape", "call", "call_async", "method", "model", "serve"]

CONCURRENCY = 100
"""Default limit of requests that one instance of an async function works on."""

OBJECT_BATCH_SIZE = 256
"""Default of `max_batch_size` of an object such as a scikit-learn estimator."""

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
"""HTTP methods of a model's own path."""

MESSAGE_CHARS_MAX = 1000
"""Longest message of a report of progress."""

_MARK = "__charonia_method__"

T = TypeVar("T")


class BadRequest(ValueError):
    """Raise it to answer a request with an error of the caller: 400, INVALID_ARGUMENT."""


class Request:
    """The HTTP request of a call: what a parameter of this type gets, `list[Request]` in a batch.

    Header fields with keys of the server are left out. Over `infer`, gRPC and calls of other models, all but the
    parameters are empty.

    Attributes:
        method: Its method.
        path: Path of the URL.
        query: Parameters of the URL; the last one of a name counts.
        headers: Header fields by lower-case name.
        client: Address of the client.
        parameters: Request parameters: keys of the body that are not inputs.
    """

    def __init__(self, parameters: dict[str, Any], received: Mapping[str, Any]) -> None:
        self.method: str = received.get("method", "")
        self.path: str = received.get("path", "")
        self.query: dict[str, str] = received.get("query", {})
        self.headers: dict[str, str] = received.get("headers", {})
        self.client: str = received.get("client", "")
        self.parameters = parameters
        self._progress_file: str = received.get("progress_file", "")

    def progress(self, share: float, message: str = "") -> None:
        """Report progress, which a client that polls for the result gets; without effect where none does.

        Args:
            share: The part that is done, from 0 to 1.
            message: What is being done, at most 1000 characters.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"progress: expected a number from 0 to 1, got {share!r}")
        if os.path.exists(self._progress_file):
            own = f"{self._progress_file}.{threading.get_ident()}"
            with contextlib.suppress(OSError):  # the server has ended
                with open(own, "w", encoding="utf-8") as file:
                    json.dump({"progress": float(share), "message": str(message)[:MESSAGE_CHARS_MAX]}, file)
                os.replace(own, self._progress_file)


class Response:
    """What a function returns to choose the body of its HTTP response, such as a picture or a page.

    Over `infer` and gRPC, the content is the output, and the rest are parameters of the response.

    Args:
        content: The body; text is sent as UTF-8.
        media_type: Its content type.
        status: HTTP status, 200 to 599.
        headers: More header fields.
    """

    def __init__(
        self,
        content: bytes | str,
        media_type: str = "application/octet-stream",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.content = content.encode() if isinstance(content, str) else bytes(content)
        self.media_type = media_type
        self.status = status
        self.headers = dict(headers or {})


class Shape:
    """The shape of an array, in an annotation: `Annotated[NDArray[np.float32], Shape(3, 224, 224)]`.

    Args:
        dims: The dimensions; -1, None or a name for one of any size.
    """

    def __init__(self, *dims: int | str | None) -> None:
        for dim in dims:
            is_size = isinstance(dim, int) and not isinstance(dim, bool) and (dim == -1 or dim > 0)
            if not (is_size or dim is None or isinstance(dim, str)):
                raise TypeError(f"Shape: expected sizes, and -1, None or a name for a variable one, got {dim!r}")
        self.dims = tuple(dim if isinstance(dim, int) else -1 for dim in dims)

    def __repr__(self) -> str:
        return f"Shape{self.dims}"


class Options(TypedDict, total=False):
    """What `model` and `serve` take besides the function or object.

    Attributes:
        name: Name of the model; by default that of the function or class, or of the object's class in lower case.
        max_batch_size: Largest batch. With it, a function gets the inputs of several requests at once, and its
            annotations are those of a batch: `list[str]`, or an array whose first dimension is the batch. 0: one
            request at a time, the default of functions; that of objects is `OBJECT_BATCH_SIZE`.
        max_delay_ms: How long a request may wait for others to share its batch with.
        max_queue_size: Most requests that may wait; further ones are refused with 503. 0: the server limits the queue
            itself when it is overloaded.
        timeout_ms: Longest time that a request may wait, after which it is refused with 503; 0 for any.
        instances: Number of worker processes, each with an instance or object of its own; 0 for what the server says.
        concurrency: Limit of requests that one instance of an async function works on at the same time.
        allow_nan: Whether NaN and infinity may be returned: in JSON they are null. False makes them an error.
        path: HTTP path of its own, such as "/predict", in addition to those of every model. There, the body of the
            response is what the function returns.
        own_process: Whether its instances have processes of their own. By default, the functions of a file run in
            threads of one process, in which the file is imported one time.
        share_memory: Whether its instances are processes that are forked from one that has imported the file and made
            the object of the class: they share the memory of weights. For CPUs, and files that start no threads.
    """

    name: str
    max_batch_size: int
    max_delay_ms: float
    max_queue_size: int
    timeout_ms: float
    instances: int
    concurrency: int
    allow_nan: bool
    path: str
    own_process: bool
    share_memory: bool


class Definition:
    """One model of a service file: what its `Options` say, and more.

    Attributes:
        example: An example request, None for none: values by input, or the batch that an object gets.
        method: Method of an object to call, "" for the target itself.
        is_object: Whether `target` is a ready object rather than a function or class.
        route: HTTP method and path of its own, "" for none.
    """

    name = ""
    max_batch_size = 0
    max_delay_ms: float = 0
    max_queue_size = 0
    timeout_ms: float = 0
    instances = 0
    concurrency = CONCURRENCY
    allow_nan = True
    path = ""
    own_process = False
    share_memory = False

    def __init__(
        self,
        target: Any,
        *,
        example: Any = None,
        method: str = "",
        is_object: bool = False,
        http_method: str = "POST",
        **options: Unpack[Options],
    ) -> None:
        name = options.get("name")
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"name of a model: expected text without '/', got {name!r}")
        for option in options:
            if option not in Options.__annotations__:
                raise TypeError(f"model '{name}': there is no option '{option}'")
        vars(self).update(options)
        for what, lowest in (("max_batch_size", 0), ("instances", 0), ("max_queue_size", 0), ("concurrency", 1)):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"model '{name}': {what}: expected an integer of at least {lowest}, got {value!r}")
        if self.max_delay_ms < 0 or (self.max_delay_ms and not self.max_batch_size):
            raise ValueError(f"model '{name}': max_delay_ms: expected at least 0, and max_batch_size with it")
        if not self.timeout_ms >= 0:
            raise ValueError(f"model '{name}': timeout_ms: expected at least 0, got {self.timeout_ms!r}")
        if self.path and http_method not in METHODS:
            raise ValueError(f"model '{name}': method: expected one of {', '.join(METHODS)}, got {http_method!r}")
        self.route = f"{http_method} {self.path}" if self.path else ""
        self.target = target
        self.example = example
        self.method = method
        self.is_object = is_object


@overload
def model(target: T, /) -> T: ...


@overload
def model(
    *, example: Mapping[str, object] | None = None, method: str = "POST", **options: Unpack[Options]
) -> Callable[[T], T]: ...


def model(
    target: Any = None,
    /,
    *,
    example: Mapping[str, object] | None = None,
    method: str = "POST",
    **options: Unpack[Options],
) -> Any:
    """Make a model of a function, or of a class whose instances can be called. Returns it unchanged.

    Args:
        target: The function or class, where the decorator is used without arguments.
        example: Plain values by input: what pages and commands show and send as an example.
        method: HTTP method of `path`.
        options: See `Options`.
    """

    def decorate(target: Any) -> Any:
        if not callable(target):
            raise TypeError(f"@model: expected a function or a class, got {type(target).__name__}")
        members = getattr(target, "__dict__", {})
        methods = {name: each for name, each in members.items() if hasattr(each, _MARK)}
        for name, each in methods.items():
            own, http_method = getattr(each, _MARK)
            arguments: dict[str, Any] = {key: value for key, value in options.items() if key not in ("name", "path")}
            arguments.update({"name": name, **own})
            define(Definition(target, method=name, http_method=http_method, **arguments))
        if not methods or "__call__" in members:
            options["name"] = options.get("name") or target.__name__
            define(Definition(target, example=example, http_method=method, **options))
        return target

    return decorate if target is None else decorate(target)


def method(function: Any = None, /, *, method: str = "POST", **options: Unpack[Options]) -> Any:
    """Make a model of a method of a class with `@model`: its models share one object, in one process.

    The object is made one time for each instance. Of its plain methods, one runs at a time.

    Args:
        function: The method, where the decorator is used without arguments.
        method: HTTP method of `path`.
        options: See `Options`; by default those of the class, and the method's own name.
    """

    def decorate(function: Any) -> Any:
        setattr(function, _MARK, (options, method))
        return function

    return decorate if function is None else decorate(function)


def serve(target: Any, /, *, example: object, method: str = "", **options: Unpack[Options]) -> Any:
    """Make a model of an object with `predict`, such as a scikit-learn estimator, or of any callable. Returns it.

    In a script that is run with Python, the server starts here, as `charonia serve SCRIPT` does. In a notebook, it
    starts in a thread, and the result has its address, `url`, and `stop()`.

    Args:
        target: The object.
        example: A batch to call it with, such as `X[:2]`: an array, or a data frame, whose columns become inputs. It
            tells names, datatypes and shapes, and is shown as an example request.
        method: Method to call; by default `predict`, or the object itself where it has none.
        options: See `Options`.
    """
    method = method or ("predict" if hasattr(target, "predict") else "")
    if not callable(getattr(target, method, None) if method else target):
        raise TypeError(f"serve: expected an object with {method or 'predict'}(), got {type(target).__name__}")
    options.setdefault("max_batch_size", OBJECT_BATCH_SIZE)
    options["name"] = options.get("name") or type(target).__name__.lower()
    definition = Definition(target, example=example, method=method, is_object=True, **options)
    define(definition)
    caller = sys._getframe(1).f_globals
    if _collected.get() is None and caller.get("__name__") == "__main__":
        if hasattr(sys, "ps1"):  # a notebook, or an interactive interpreter
            return importlib.import_module("charonia.server.notebook").Served(definition)
        if not os.path.isfile(caller.get("__file__", "")):
            raise RuntimeError(
                "charonia.serve: expected a script in a file, or a notebook; this code comes from standard input or -c "
                "(hint: save it as service.py, and run `python service.py`)"
            )
        os.execv(sys.executable, [sys.executable, "-P", "-m", "charonia", "serve", os.path.abspath(caller["__file__"])])
    return target


def call(model: str, /, **inputs: object) -> dict[str, Array]:
    """Call another model of the server by its name, and return its outputs by name.

    Inputs are arrays, or strings, numbers and lists. Arrays have the batch dimension of a model that has one; plain
    values for a model of the same file need none. Strings in outputs are `bytes`.

    Raises:
        TritonModelException: The other model's error.
    """
    return _caller().call(model, inputs)


async def call_async(model: str, /, **inputs: object) -> dict[str, Array]:
    """Call another model, in an async function; see `call`."""
    return await _caller().call_async(model, inputs)


running: ContextVar[Caller | None] = ContextVar("charonia_running", default=None)
"""What calls other models for the model that runs in this thread or task."""

_collected: ContextVar[list[Definition] | None] = ContextVar("charonia_collected", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[Definition]]:
    """Gather the definitions of a file that is imported meanwhile."""
    found: list[Definition] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def define(definition: Definition) -> None:
    """Add a definition to the file that is being imported, if one is."""
    found = _collected.get()
    if found is None:
        return
    if any(other.name == definition.name for other in found):
        raise ValueError(f"two models are called '{definition.name}': give one another name, with name=")
    if definition.route and any(other.route == definition.route for other in found):
        raise ValueError(f"two models have the path '{definition.route}': give one another, with path=")
    found.append(definition)


def _caller() -> Caller:
    caller = running.get()
    if caller is None:
        raise RuntimeError("call works only in a model that a server runs, and in threads that it did not start itself")
    return caller
