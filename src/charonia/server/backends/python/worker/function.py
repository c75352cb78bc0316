"""What a definition of a service file says: its configuration, and arguments and results of its calls."""

from __future__ import annotations

import base64
import difflib
import inspect
import json
from typing import TYPE_CHECKING

import numpy as np

from ....channel.tables import TableError, class_schema, table_of
from . import signature as signatures
from .kinds import ColumnKind, ImageKind, JsonKind, Kind, made
from .service import BadRequest, Request, Response
from .signature import Port, Signature

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any

    from ....channel.datatypes import Array
    from ....channel.tables import DataTable
    from .model_config import ModelConfig
    from .service import Definition

EXAMPLE = "EXAMPLE"
"""Model parameter with an example request."""

JSON_SCHEMA = "JSON_SCHEMA"
"""Model parameter with the JSON schemas of inputs and outputs."""

CONTENT_TYPE, STATUS, HEADERS = "http_content_type", "http_status", "http_headers"
"""Response parameters that say how the content of a `Response` is sent over HTTP; headers are a JSON object."""

HTTP_ROUTE = "HTTP_ROUTE"
"""Model parameter: HTTP method and path of its own."""

HTTP_REQUEST = "HTTP_REQUEST"
"""Model parameter: "true" if the model gets the HTTP request of a call."""

RECEIVED = "triton_http_request"
"""Request parameter with the HTTP request as JSON, which clients cannot set."""

CLASS_OUTPUTS = ("predict", "predict_proba", "predict_log_proba")
"""Methods of a classifier whose results are named by its classes."""

NONE = "{}"
"""No request parameters."""


class Function:
    """What a definition says about calls, without an instance."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.is_batched = definition.max_batch_size > 0
        self._table: DataTable | None = None  # of a data frame
        if definition.is_object:
            self.signature = self._of_object()
        elif definition.example is not None and not _annotations(definition.target):
            self.signature = self._of_example(dict(definition.example))
        else:
            target = definition.target
            function = _call_of(target, definition.method or "__call__") if inspect.isclass(target) else target
            self.signature = signatures.signature_of(function, definition.name, is_batched=self.is_batched)

        self.has_image = not self.is_batched and any(isinstance(p.kind, ImageKind) for p in self.signature.outputs)
        for port in self.signature.outputs:
            if isinstance(port.kind, JsonKind):
                port.kind.allow_nan = definition.allow_nan

    def complete(self, config: ModelConfig) -> None:
        """Complete a configuration."""
        definition, fields = self.definition, config.as_dict()
        if fields.get("max_batch_size") and not self.is_batched:
            raise ValueError(
                f"model '{definition.name}' takes one request at a time, and the configuration says max_batch_size "
                f"{fields['max_batch_size']}: give the decorator max_batch_size=, and the function a batch"
            )
        if not fields.get("max_batch_size"):
            config.set_max_batch_size(definition.max_batch_size)
        if self.is_batched and not fields.get("sequence_batching"):
            config.set_dynamic_batching()
            if definition.max_delay_ms and fields["dynamic_batching"] is not None:
                delay_us = int(definition.max_delay_ms * 1000)
                fields["dynamic_batching"]["max_queue_delay_microseconds"] = (
                    fields["dynamic_batching"].get("max_queue_delay_microseconds") or delay_us
                )
        if (definition.max_queue_size or definition.timeout_ms) and not fields.get("sequence_batching"):
            config.set_dynamic_batching()
            policy = fields["dynamic_batching"].setdefault("default_queue_policy", {})
            policy.setdefault("max_queue_size", definition.max_queue_size)
            policy.setdefault("default_timeout_microseconds", int(definition.timeout_ms * 1000))
        if self.signature.is_stream:
            config.set_model_transaction_policy({"decoupled": True})
        for port in self.signature.inputs:
            properties = {"name": port.name, "data_type": port.kind.data_type, "dims": list(port.kind.dims)}
            config.add_input({**properties, "optional": True} if not port.is_required else properties)
        for port in self.signature.outputs:
            config.add_output({"name": port.name, "data_type": port.kind.data_type, "dims": list(port.kind.dims)})
        if definition.instances and not fields.get("instance_group"):
            fields["instance_group"] = [{"count": definition.instances}]
        parameters, example = fields.setdefault("parameters", {}), self._example_text()
        if example:
            parameters.setdefault(EXAMPLE, {"string_value": example})
        if definition.route:
            parameters.setdefault(HTTP_ROUTE, {"string_value": definition.route})
        if self.signature.request or self.has_image:
            parameters.setdefault(HTTP_REQUEST, {"string_value": "true"})
        schemas = {"inputs": _schemas(self.signature.inputs), "outputs": _schemas(self.signature.outputs)}
        parameters.setdefault(JSON_SCHEMA, {"string_value": json.dumps(schemas)})

    def _of_object(self) -> Signature:
        definition = self.definition
        if isinstance(definition.example, (list, tuple)):
            definition.example = np.asarray(definition.example)
        example, call = definition.example, self.bound(definition.target)
        if hasattr(example, "columns"):
            if not self.is_batched:
                raise TypeError(f"model '{definition.name}': an object that gets a data frame needs max_batch_size")
            self._table = table = table_of(example)
            table.find_nullable(call)
            inputs = [Port(each.name, ColumnKind(each), not each.is_nullable) for each in table.columns]
        else:
            inputs = [Port(signatures.OBJECT_INPUT, self._kind(example))]
        kind, schema = self._kind(call(example)), None
        classes: Any = getattr(definition.target, "classes_", None)
        if definition.method in CLASS_OUTPUTS and np.ndim(classes) == 1:
            is_label = definition.method == "predict"
            if is_label or kind.dims == (len(classes),):
                schema = class_schema(list(classes), is_label=is_label)
        return Signature(inputs, [Port(signatures.OUTPUT, kind, schema=schema)], None, "one", False)

    def _of_example(self, example: dict[str, Any]) -> Signature:
        """Call a function without annotations with its example."""
        function: Any = self.definition.target
        if inspect.isclass(function):
            function = function()
        returned = function(**example)
        if inspect.isgenerator(returned) or inspect.isawaitable(returned) or inspect.isasyncgen(returned):
            raise TypeError(
                f"model '{self.definition.name}': annotate parameters and result of an async or generator function"
            )
        inputs = [Port(name, self._kind(value)) for name, value in example.items()]
        return Signature(inputs, [Port(signatures.OUTPUT, self._kind(returned))], None, "one", False)

    def _kind(self, value: Any) -> Kind:
        try:
            return signatures.kind_of_value(value, is_batch=self.is_batched)
        except TypeError as error:
            raise TypeError(f"model '{self.definition.name}': {error}") from None

    def bound(self, target: Any) -> Callable[..., Any]:
        """Return what is called of an instance."""
        called: Callable[..., Any] = getattr(target, self.definition.method) if self.definition.method else target
        return called

    def _example_text(self) -> str:
        """Return the example request as JSON, "" where any values of the datatypes make one."""
        example = self.definition.example
        if example is None:
            made = [(port, port.kind.example()) for port in self.signature.inputs if port.is_required]
            plain = {port.name: _json(port.kind, port.kind.write(value)) for port, value in made if value is not None}
            return json.dumps(plain) if plain else ""
        if self._table is not None:
            values = {column.name: column.examples(1) for column in self._table.columns}
        else:
            values = {signatures.OBJECT_INPUT: example} if self.definition.is_object else dict(example)
        plain = {}
        for port in self.signature.inputs:
            if port.name in values:
                value = values[port.name]
                if self.is_batched and self.definition.is_object:
                    value = value[:1]  # one item is example enough
                elif self.is_batched and not isinstance(value, (list, np.ndarray)):
                    value = [value]
                array = port.kind.write_batch(value) if self.is_batched else port.kind.write(value)
                plain[port.name] = _json(port.kind, array)
        return json.dumps(plain)

    def read(self, tensors: Mapping[str, Array], parameters: str = NONE) -> dict[str, Any]:
        """Return the arguments of a call.

        Raises:
            BadRequest: An input is no such value, or a parameter is a misspelt input.
        """
        arguments = json.loads(parameters) if parameters != NONE else {}
        received = arguments.pop(RECEIVED, NONE)
        if arguments:
            self._check_parameters(arguments, tensors)
        values: dict[str, Any] = {}
        if self.signature.request:
            size = len(next(iter(tensors.values()))) if tensors else 1
            request = Request(arguments, json.loads(received))
            values[self.signature.request] = [request] * size if self.is_batched else request
        for port in self.signature.inputs:
            if port.name in tensors:
                array = tensors[port.name]
                try:
                    values[port.name] = port.kind.read_batch(array) if self.is_batched else port.kind.read(array)
                except BadRequest as error:
                    raise BadRequest(f"input '{port.name}': {error}") from None
        return values

    def _check_parameters(self, names: Collection[str], tensors: Mapping[str, Array]) -> None:
        absent = [port.name for port in self.signature.inputs if port.name not in tensors]
        for name in names:
            near = difflib.get_close_matches(name, absent, n=1, cutoff=0.8)
            if near:
                raise BadRequest(
                    f"model '{self.definition.name}' has no input '{name}' (hint: did you mean '{near[0]}'?)"
                )

    def arguments(self, values: dict[str, Any], size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return values as positional and keyword arguments.

        Raises:
            BadRequest: They make no record.
        """
        record = self.signature.record
        if self.definition.is_object:
            if self._table is not None:
                try:
                    return (self._table.frame(values),), {}
                except TableError as error:
                    raise BadRequest(str(error)) from None
            return (values[signatures.OBJECT_INPUT],), {}
        if record is None:
            return (), values
        own = self.signature.request
        requests = {own: values[own]} if own else {}
        values = {name: value for name, value in values.items() if name != own}
        if not self.is_batched:
            return (made(record, values),), requests
        rows = [{name: column[at] for name, column in values.items()} for at in range(size)]
        return ([made(record, row) for row in rows],), requests

    def accepted(self, parameters: str) -> str:
        """Return the header field Accept of a request, by its parameters, where it matters; else ""."""
        if not self.has_image or RECEIVED not in parameters:
            return ""
        accept: str = json.loads(json.loads(parameters)[RECEIVED])["headers"].get("accept", "")
        return accept

    def write(self, returned: Any, size: int = 0, accept: str = "") -> list[tuple[str, Array]]:
        """Return the outputs of a call.

        Args:
            accept: Result of `accepted`.

        Raises:
            TypeError: It is not what the annotation says.
            ValueError: As above.
        """
        written = []
        for at, port in enumerate(self.signature.outputs):
            try:
                value = self._part(returned, at, port)
                if accept and isinstance(port.kind, ImageKind):
                    array = port.kind.write(value, accept)
                else:
                    array = port.kind.write_batch(value) if self.is_batched else port.kind.write(value)
            except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError) as error:
                shown = f"{type(error).__name__}: {error}"
                raise TypeError(f"'{self.definition.name}' returned a wrong '{port.name}': {shown}") from error
            if not self.definition.allow_nan and array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"what '{self.definition.name}' returned holds NaN or infinity in '{port.name}'")
            if self.is_batched and len(array) != size:
                raise ValueError(f"'{self.definition.name}' got a batch of {size} and returned {len(array)}")
            written.append((port.name, array))
        return written

    @staticmethod
    def parameters(returned: Any) -> dict[str, str | int | bool]:
        """Return the response parameters for a `Response`: content type, status and header fields."""
        if not isinstance(returned, Response):
            return {}
        return {CONTENT_TYPE: returned.media_type, STATUS: returned.status, HEADERS: json.dumps(returned.headers)}

    def _part(self, returned: Any, at: int, port: Port) -> Any:
        """Return the value of one output; of a batch, a value an item."""
        returns = self.signature.returns
        if returns == "one":
            is_array = hasattr(returned, "to_numpy") and not isinstance(port.kind, JsonKind)
            return returned.to_numpy() if is_array else returned
        if returns == "tuple":
            return returned[at]
        if self.is_batched:
            return [_field(record, port.name) for record in returned]
        return _field(returned, port.name)


def _schemas(ports: list[Port]) -> dict[str, Any]:
    """Return the schemas of the tensors of ports by name."""
    found = {}
    for port in ports:
        schema = port.kind.schema
        if port.schema is not None and "contentSchema" in schema:
            schema = {**schema, "contentSchema": port.schema}
        found[port.name] = schema if port.schema is None or "contentSchema" in schema else port.schema
    return found


def _field(record: Any, name: str) -> Any:
    return record[name] if isinstance(record, dict) else getattr(record, name)


def _annotations(target: Any) -> bool:
    function = target.__call__ if inspect.isclass(target) else target
    return bool(getattr(function, "__annotations__", None))


def _call_of(target: type, name: str) -> Callable[..., Any]:
    """Return a method of a class, without `self`."""
    call = inspect.getattr_static(target, name, None)
    if not inspect.isfunction(call):
        raise TypeError(f"class '{target.__name__}' has no method {name}, which answers requests")
    return call.__get__(object())


def _json(kind: Kind, array: Array) -> Any:
    """Return the tensor of a value, or of several, as JSON has it."""
    if kind.dims == (1,) and kind.schema["type"] != "array":
        array = array.reshape(array.shape[:-1])
    if array.dtype != np.object_:
        return array.tolist()
    read = json.loads if isinstance(kind, JsonKind) else _readable
    values = np.empty(array.size, np.object_)
    values[:] = [read(element) for element in array.ravel().tolist()]
    return values.reshape(array.shape).tolist()


def _readable(element: bytes) -> Any:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(element).decode()}
