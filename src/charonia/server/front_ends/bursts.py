"""Plain requests and plain responses between a front end and the engine, batched into messages. Pure.

Most requests of a client differ in the elements of their tensors only. Their common part, the *form*, is sent one time,
and named by a number from then on; responses have forms, too. A request is plain if it has no more than inputs, an id,
the names of outputs and a deadline; a response, no more than outputs, its id and how it was run. Everything else
travels alone, in a message of `messages.py`.

A message has the new forms, the records of all requests or responses one after the other, the sizes of BYTES tensors,
and one block with the elements of all tensors. Each begins at a multiple of the channel's alignment.
"""

from collections.abc import Hashable, Iterable
from typing import Any, Final, Generic, TypeVar

import numpy as np

from charonia.core.dtypes import BY_WIRE, DataType
from charonia.core.request import NO_FLOW, Flow, InferRequest, RequestedOutput
from charonia.core.response import ExecutionRecord, InferResponse
from charonia.core.tensor import Tensor
from charonia.server.channel.channel import ALIGNMENT, INLINE_BYTES_MAX, Incoming, Outgoing
from charonia.server.channel.regions import ChannelError
from charonia.wire.tensors import Buffer, decode_tensor, encode_elements, encode_tensor

BURST_MAX: Final = 256
"""Requests, or responses, of a message; one more travels alone."""

BURST_BYTES_MAX: Final = INLINE_BYTES_MAX
"""Bytes of their tensors together."""

FORMS_MAX = 1024
"""Limit of forms with a number; beyond it, an end drops all and begins again."""

T = TypeVar("T")

_BYTES: Final = DataType.BYTES
_PADDING: Final = bytes(ALIGNMENT)


class _Writer:
    """Collects the requests, or the responses, of a message."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._forms: dict[Hashable, int] = {}
        self._begin()

    def __bool__(self) -> bool:
        return self._count > 0

    def _begin(self) -> None:
        self._count = 0
        self._size = 0
        self._announced: list[tuple[int, object]] = []
        self._records: list[object] = []
        self._sizes: list[int] = []
        self._block: list[Buffer] = []

    def _add(self, head: Iterable[Hashable], tensors: Iterable[Tensor], record: tuple[object, ...]) -> bool:
        """Add a record and its tensors, whose form begins with `head`; return False if they do not fit."""
        parts: list[Hashable] = [*head]
        size, sizes, block = self._size, [], []
        for tensor in tensors:
            array, datatype = tensor.array, tensor.datatype
            data: Buffer
            if datatype is _BYTES:
                elements: list[bytes] = array.ravel().tolist()
                if sum(map(len, elements)) > BURST_BYTES_MAX:
                    return False
                data = encode_elements(elements)
                sizes.append(len(data))
            elif array.nbytes > BURST_BYTES_MAX:
                return False
            else:
                data = encode_tensor(tensor)
            parts += (tensor.name, datatype.wire, array.shape)
            block.append(data)
            length = len(data)
            padding = -length % ALIGNMENT
            if padding:
                block.append(_PADDING[:padding])
            size += length + padding
        if size > BURST_BYTES_MAX or self._count >= BURST_MAX:
            return False
        form = tuple(parts)
        form_id = self._forms.get(form)
        if form_id is None:
            if len(self._forms) >= FORMS_MAX:
                return False
            form_id = self._forms[form] = len(self._forms)
            self._announced.append((form_id, form))
        self._count += 1
        self._size = size
        if sizes:
            self._sizes += sizes
        self._block += block
        self._records += (form_id, *record)
        return True

    def take(self, outgoing: Outgoing) -> tuple[object, ...]:
        """Return the message of all additions, with its tensors in `outgoing`, and begin the next one."""
        place = outgoing.place(b"".join(self._block))
        header = (self._kind, self._announced, self._records, self._sizes, place)
        self._begin()
        if len(self._forms) >= FORMS_MAX:
            self._forms.clear()
        return header


class RequestWriter(_Writer):
    """Collects plain requests for a message. The flow of a request is sent if the one before has another."""

    def __init__(self) -> None:
        super().__init__("infers")

    def _begin(self) -> None:
        super()._begin()
        self._flow = NO_FLOW

    def add(self, number: int, request: InferRequest) -> bool:
        """Add a request; return False if it has to travel alone."""
        if (
            request.trace is not None
            or request.parameters
            or request.correlation_id
            or request.flags
            or request.priority
            or request.timeout_us
            or request.affinity
        ):
            return False
        outputs = tuple([(each.name, each.classification) for each in request.outputs]) if request.outputs else ()
        head = (request.model_name, request.model_version, outputs)
        flow = None if request.flow == self._flow else tuple(request.flow)
        is_added = self._add(head, request.inputs.values(), (number, request.id, request.deadline_ns, flow))
        self._flow = request.flow if is_added else self._flow
        return is_added


class ResponseWriter(_Writer):
    """Collects plain responses for a message."""

    def __init__(self) -> None:
        super().__init__("outcomes")

    def add(self, number: int, response: InferResponse) -> bool:
        """Add a request's only response; return False if it has to travel alone."""
        run = response.execution
        if run is None or response.parameters:
            return False
        head = (response.model_name, response.model_version, run.instance)
        record = (number, response.id, run.batch_size, run.queue_ns, run.compute_ns)
        return self._add(head, response.outputs, record)


class _Form(Generic[T]):
    """The common part of requests, or of responses.

    Attributes:
        head: Their common fields besides the tensors.
        tensors: Name, datatype, shape, dtype and padded size in bytes of each tensor; -1 where the size varies.
    """

    __slots__ = ("head", "tensors")

    def __init__(self, head: T, described: Iterable[Any]) -> None:
        """Create a form; `described` has name, datatype and shape of one tensor after the other."""
        self.head = head
        parts = iter(described)
        self.tensors = [
            _planned(name, BY_WIRE[wire], shape) for name, wire, shape in zip(parts, parts, parts, strict=True)
        ]


def _planned(
    name: str, datatype: DataType, shape: tuple[int, ...]
) -> tuple[str, DataType, tuple[int, ...], "np.dtype[np.generic]", int]:
    size = -1 if datatype is _BYTES else _padded(int(np.prod(shape, dtype=np.int64)) * datatype.byte_size)
    return name, datatype, shape, datatype.numpy, size


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT


class _Block:
    """The elements of the tensors of a message."""

    __slots__ = ("_data", "_position", "_sizes")

    def __init__(self, data: memoryview, sizes: Iterable[int]) -> None:
        self._data = data
        self._sizes = iter(sizes)
        self._position = 0

    def tensors(self, form: _Form[Any]) -> dict[str, Tensor]:
        """Return the next tensors, which have this form, by name."""
        found: dict[str, Tensor] = {}
        data, position = self._data, self._position
        for name, datatype, shape, dtype, size in form.tensors:
            if size >= 0:
                found[name] = Tensor(name, datatype, np.ndarray(shape, dtype, data, position))
                position += size
            else:
                end = position + next(self._sizes)
                found[name] = decode_tensor(name, datatype, shape, data[position:end])
                position = _padded(end)
        self._position = position
        return found


class RequestReader:
    """Reads the messages of a `RequestWriter` at the other end."""

    def __init__(self) -> None:
        self._forms: dict[int, _Form[tuple[str, str, tuple[RequestedOutput, ...]]]] = {}

    def read(self, message: Incoming) -> Iterable[tuple[list[int], list[InferRequest]]]:
        """Return the numbers and the requests, grouped by form; those of a model stay in their order.

        Raises:
            ChannelError: The message is not as a `RequestWriter` makes it.
        """
        _, announced, records, sizes, place, *_ = message.header
        forms = self._forms
        for form_id, (model, version, outputs, *inputs) in announced:
            forms[form_id] = _Form((model, version, tuple(RequestedOutput(*each) for each in outputs)), inputs)
        block = _Block(message.find(place), sizes)
        groups: list[tuple[list[int], list[InferRequest]]] = []
        last: dict[str, tuple[int, list[int], list[InferRequest]]] = {}  # form and group of each model's last request
        fields, flow = iter(records), NO_FLOW
        try:
            for form_id, number, request_id, deadline_ns, other in zip(*[fields] * 5, strict=True):
                form = forms[form_id]
                model, version, outputs = form.head
                if other is not None:
                    flow = Flow(*other)
                group = last.get(model)
                if group is None or group[0] != form_id:
                    group = last[model] = (form_id, [], [])
                    groups.append(group[1:])
                group[1].append(number)
                group[2].append(
                    InferRequest(
                        model, block.tensors(form), model_version=version, id=request_id, outputs=outputs,
                        deadline_ns=deadline_ns, flow=flow,
                    )
                )  # fmt: skip
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            raise ChannelError(f"a message of requests is malformed: {error!r}") from error
        return groups


class BurstReader:
    """Reads the messages of a `ResponseWriter` at the other end."""

    def __init__(self) -> None:
        self._forms: dict[int, _Form[tuple[str, str, str]]] = {}

    def read(self, message: Incoming) -> list[tuple[int, InferResponse]]:
        """Return the responses, each behind the number of its request.

        Raises:
            ChannelError: The message is not as a `ResponseWriter` makes it.
        """
        _, announced, records, sizes, place, *_ = message.header
        forms = self._forms
        for form_id, (model, version, instance, *outputs) in announced:
            forms[form_id] = _Form((model, version, instance), outputs)
        block = _Block(message.find(place), sizes)
        fields = iter(records)
        found: list[tuple[int, InferResponse]] = []
        try:
            for form_id, number, request_id, batch_size, queue_ns, compute_ns in zip(*[fields] * 6, strict=True):
                form = forms[form_id]
                model, version, instance = form.head
                run = ExecutionRecord(instance, batch_size, queue_ns, compute_ns)
                outputs = list(block.tensors(form).values())
                found.append((number, InferResponse(model, version, request_id, outputs, None, run)))
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            raise ChannelError(f"a message of responses is malformed: {error!r}") from error
        return found
