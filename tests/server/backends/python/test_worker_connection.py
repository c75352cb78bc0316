"""The worker's end of the connection, with a server's end that is played here."""

import gc
import random
import select
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.server_end import FIELDS, ServerEnd, place

from charonia.server.backends.api import Outputs
from charonia.server.backends.python.worker import host
from charonia.server.backends.python.worker.connection import ELEMENT_BYTES_MAX, Disconnected, WorkerConnection
from charonia.server.backends.python.worker.errors import TritonError
from charonia.server.backends.python.worker.host import Inbox, ModelBatch, ModelCall
from charonia.server.backends.python.worker.requests import InferenceResponse, response_of
from charonia.server.backends.python.worker.tensor import Tensor, received
from charonia.server.backends.workers.codec import decode_results
from charonia.server.channel.channel import INLINE_BYTES_MAX, Incoming, Outgoing
from charonia.server.channel.datatypes import TritonModelException
from charonia.server.channel.regions import ChannelError

LARGE = INLINE_BYTES_MAX // 4 + 1


class Server(ServerEnd):
    """The server's end, and the worker's."""

    def __init__(self) -> None:
        super().__init__(timeout_s=200)
        self.connection = WorkerConnection(*self.theirs, "m_0_0")

    def reply(self, call: int, array: Any, final: bool = True, released: tuple[int, ...] = ()) -> None:
        outgoing = Outgoing(self.pool)
        result = (-1, [place("OUT", array, outgoing)], {"k": 1})
        self.send(("reply", call, result, final, list(released), []), outgoing)


class Released:
    """Memory of the worker; none of these tests gives any back."""

    def release(self, region: int) -> None:
        raise AssertionError

    release_handle = release


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()
    references = server.connection.writer.references  # which end with the process elsewhere
    references.pool.close()
    references.mappings.close()
    gc.collect()  # mapped memory keeps a descriptor each


def ones(count: int, value: float = 1) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.full(count, value, np.float32)


def call(*inputs: Tensor, name: str = "other", decoupled: bool = False) -> ModelCall:
    return ModelCall(0, name, "", decoupled, FIELDS, list(inputs))


def next_response(made: ModelCall) -> InferenceResponse:
    result, _ = made.inbox.items.popleft()
    assert result is not None
    return response_of(result)


def next_value(made: ModelCall) -> float:
    return float(next_response(made).output_tensors()[0].as_numpy()[0])


def take_batch(connection: WorkerConnection) -> tuple[ModelBatch, list[tuple[Any, list[Tensor]]]]:
    connection.wait(connection.tasks)
    kind, batch, requests = connection.tasks.items.popleft()
    assert kind == "execute"
    return batch, requests


def exec_call(connection: WorkerConnection, made: ModelCall) -> float:
    connection.begin(made)
    connection.wait(made.inbox)
    return next_value(made)


# Batches


def test_an_ordinary_batch_gives_its_memory_back_with_its_answer(server: Server) -> None:
    server.execute(1, ones(LARGE, 5))
    batch, ((_, (tensor,)),) = take_batch(server.connection)
    assert tensor.as_numpy()[-1] == 5

    server.connection.done(batch, [(-1, [Tensor("OUT", ones(2, 6))], {})], 1, 2)

    _, number, results, released, dropped, input_end, output_start = server.receive().header
    assert (number, released, dropped, input_end, output_start) == (1, [1], [], 1, 2)
    assert results[0][0] == -1


def test_batches_of_one_message_give_back_each_its_own_memory(server: Server) -> None:
    outgoing = Outgoing(server.pool)
    arrays = [ones(3, 1), ones(LARGE, 2), ones(5, 3), ones(LARGE, 4)]
    batches = [(number, [(FIELDS, [place("IN", array, outgoing)])]) for number, array in enumerate(arrays, 1)]
    server.send(("execute", batches, [], []), outgoing)

    for array, released in zip(arrays, ([], [1], [], [2]), strict=True):
        batch, ((_, (tensor,)),) = take_batch(server.connection)
        np.testing.assert_array_equal(tensor.as_numpy(), array)
        server.connection.done(batch, [(0, "no")], 0, 0)
        assert server.receive().header[3] == released


def test_an_input_that_is_returned_is_named_and_not_copied(server: Server) -> None:
    server.execute(1, ones(LARGE, 5))
    batch, ((_, (tensor,)),) = take_batch(server.connection)

    server.connection.done(batch, [(-1, [Tensor("OUT", tensor.as_numpy())], {})], 0, 0)

    message = server.receive()
    _, _, results, released, *_ = message.header
    (_, _, _, placed) = results[0][1][0]
    assert placed[0] == -1
    assert released == [1]


def test_an_input_that_was_kept_too_long_is_not_named(server: Server) -> None:
    server.execute(1, ones(LARGE, 5))
    batch, ((_, (tensor,)),) = take_batch(server.connection)
    server.connection.done(batch, [(0, "no")], 0, 0)
    server.receive()

    server.execute(2, ones(1))
    batch, _ = take_batch(server.connection)
    server.connection.done(batch, [(-1, [tensor], {})], 0, 0)

    _, _, results, *_ = server.receive().header
    assert results[0][1][0][3][0] > 0


def test_the_memory_of_a_batch_stays_until_its_last_request_is_answered(server: Server) -> None:
    server.execute(7, ones(LARGE), ones(LARGE))
    batch, _ = take_batch(server.connection)

    server.connection.respond(batch, 0, (-1, [Tensor("OUT", ones(1))], {}), True)
    server.connection.done(batch, [None, None], 0, 0)
    server.connection.respond(batch, 1, (-1, [Tensor("OUT", ones(1))], {}), False)
    server.connection.respond(batch, 1, None, True)

    messages = [server.receive().header for _ in range(4)]
    assert [header[0] for header in messages] == ["responses", "done", "responses", "responses"]
    responses = [header[1:] for header in messages if header[0] == "responses"]
    assert [(number, index, final) for ((number, index, _, final),), _, _ in responses] == [
        (7, 0, True),
        (7, 1, False),
        (7, 1, True),
    ]
    assert messages[1][3] == []
    assert [released for _, released, _ in responses] == [[], [], [1, 2]]


def test_a_cancellation_is_seen_while_nobody_else_reads(server: Server) -> None:
    server.execute(1, ones(1), ones(1))
    batch, _ = take_batch(server.connection)
    server.connection.poll()
    assert batch.cancelled == set()

    server.send(("cancel", 1, 1))
    server.send(("cancel", 99, 0))
    server.connection.poll()

    assert batch.cancelled == {1}


def test_a_listener_is_called_once_when_its_caller_goes_or_has_gone(server: Server) -> None:
    server.execute(1, ones(1), ones(1), ones(1))
    batch, _ = take_batch(server.connection)
    called: list[str] = []
    batch.listen(0, lambda: called.append("first"))
    batch.listen(2, lambda: called.append("third"))

    server.send(("cancel", 1, 0))
    server.send(("cancel", 1, 0))
    server.send(("cancel", 1, 1))
    server.connection.poll()
    batch.listen(1, lambda: called.append("second, late"))

    assert called == ["first", "second, late"]


def test_responses_that_are_sent_together_are_one_message(server: Server) -> None:
    server.execute(4, ones(LARGE))
    server.execute(5, ones(1))
    first, _ = take_batch(server.connection)
    second, _ = take_batch(server.connection)

    server.connection.respond_together(
        [
            (first, 0, (-1, [Tensor("OUT", ones(1))], {}), True),
            (second, 0, (-1, [Tensor("OUT", ones(2))], {}), False),
            (second, 0, None, True),
        ]
    )

    message = server.receive()
    _, responses, released, _ = message.header
    assert [(number, final) for number, _, _, final in responses] == [(4, True), (5, False), (5, True)]
    sizes = [np.frombuffer(message.find(result[1][0][3]), np.float32).size for _, _, result, _ in responses[:2]]
    assert sizes == [1, 2]
    assert released == [1]  # the memory of the first one's input


@pytest.mark.parametrize("size", [0, 4, ELEMENT_BYTES_MAX, ELEMENT_BYTES_MAX + 1])
def test_a_single_string_arrives_whether_its_header_holds_it_or_not(server: Server, size: int) -> None:
    server.execute(1, ones(1))
    batch, _ = take_batch(server.connection)
    text = np.array([b"x" * size], object)

    server.connection.respond(batch, 0, (-1, [Tensor("OUT", text), Tensor("MORE", ones(1))], {}), True)

    message = server.receive()
    ((_, _, result, _),) = message.header[1]
    assert (type(result[1][0][3]) is bytes) is (size <= ELEMENT_BYTES_MAX)
    (outputs,) = decode_results([result], message, Released())
    assert isinstance(outputs, Outputs)
    assert [tensor.array.tolist() for tensor in outputs.tensors] == [[b"x" * size], [1.0]]


def test_a_response_that_cannot_be_sent_is_an_error_of_its_batch(server: Server) -> None:
    class Unwritable:
        def __str__(self) -> str:
            raise ValueError("not even as text")

    server.execute(1, ones(1))
    batch, _ = take_batch(server.connection)
    array = np.empty(1, object)
    array[0] = Unwritable()

    server.connection.respond(batch, 0, (-1, [Tensor("L", ones(LARGE)), Tensor("OUT", array)], {}), True)

    _, ((_, _, result, _),), _, _ = server.receive().header
    assert result == (TritonError.INTERNAL, "a response of model 'm_0_0' cannot be sent: not even as text")


# Calls


@pytest.mark.parametrize("count", [0, 1, LARGE])
def test_tensors_of_a_call_and_its_reply_arrive(server: Server, count: int) -> None:
    made = call(Tensor("IN", ones(count, 3)))
    server.connection.begin(made)
    message = server.receive()
    kind, number, batch, model, version, decoupled, on_gpu, fields, tensors, *lists = message.header
    data = np.frombuffer(message.find(tensors[0][3]), np.float32)

    assert (kind, number, batch, model, version) == ("call", made.number, 0, "other", "")
    assert (decoupled, on_gpu) == (False, False)
    assert (fields, lists) == (FIELDS, [[], []])
    assert data.tolist() == [3] * count

    server.reply(number, ones(count, 4))
    server.connection.wait(made.inbox)
    assert [final for _, final in made.inbox.items] == [True]
    response = next_response(made)
    assert response.output_tensors()[0].as_numpy().tolist() == [4] * count
    assert response.parameters() == '{"k": 1}'


def test_the_memory_of_a_reply_goes_back_when_the_last_array_over_it_is_gone(server: Server) -> None:
    made = call()
    server.connection.begin(made)
    server.reply(server.receive().header[1], ones(LARGE, 4))
    server.connection.wait(made.inbox)
    part = next_response(made).output_tensors()[0].as_numpy()[10:20].reshape(2, 5)
    del made
    gc.collect()

    server.connection.begin(call())
    assert server.receive().header[-2] == []
    assert part.tolist() == [[4] * 5] * 2
    del part
    gc.collect()
    server.connection.begin(call())
    assert server.receive().header[-2] == [1]


def test_memory_that_the_server_gives_back_is_used_again(server: Server) -> None:
    numbers = []
    for _ in range(3):
        made = call(Tensor("IN", ones(LARGE)))
        server.connection.begin(made)
        message = server.receive()
        message.find(message.header[8][0][3])
        numbers += message.regions
        server.reply(made.number, ones(1), released=tuple(message.regions))
        server.connection.wait(made.inbox)

    assert numbers == [1, 1, 1]


def test_a_failure_and_the_lack_of_a_response_arrive(server: Server) -> None:
    first, second = call(), call(decoupled=True)
    server.connection.begin(first)
    server.connection.begin(second)

    server.send(("reply", first.number, (3, "no"), True, [], []))
    server.send(("reply", second.number, None, True, [], []))
    server.connection.wait(second.inbox)

    error = next_response(first).error()
    assert error is not None
    assert (error.code(), error.message()) == (TritonError.INVALID_ARG, "no")
    assert list(second.inbox.items) == [(None, True)]


def test_a_call_is_given_up_until_its_last_reply(server: Server) -> None:
    made = call(decoupled=True)
    server.connection.begin(made)
    server.connection.end(made)
    server.connection.end(made)
    server.send(("reply", made.number, None, True, [], []))
    server.connection.wait(made.inbox)

    server.connection.end(made)
    server.connection.writer.send(("after",))

    assert [server.receive().header[0] for _ in range(4)] == ["call", "call_cancel", "call_cancel", "after"]


def test_a_call_whose_responses_are_not_read_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "RESPONSES_UNREAD_MAX", 3)
    stream = call(decoupled=True)
    server.connection.begin(stream)
    for value in range(5):
        server.reply(stream.number, ones(1, value), final=False)

    server.connection.poll()

    assert [final for _, final in stream.inbox.items] == [False, False, False, True]
    assert [next_value(stream) for _ in range(3)] == [0, 1, 2]
    error = next_response(stream).error()
    assert error is not None
    assert error.code() == TritonError.UNAVAILABLE
    assert error.message() == "the responses of model 'other' were not read fast enough"
    assert [server.receive().header[:2] for _ in range(2)][1] == ("call_cancel", stream.number)


def test_a_batch_that_arrives_while_a_call_waits_is_kept(server: Server) -> None:
    made = call()
    server.connection.begin(made)
    server.execute(2, ones(LARGE, 2))
    server.reply(made.number, ones(LARGE, 3))

    server.connection.wait(made.inbox)

    assert next_value(made) == 3
    batch, ((_, (tensor,)),) = take_batch(server.connection)
    assert batch.number == 2
    assert tensor.as_numpy()[0] == 2


def test_a_call_that_cannot_be_sent_is_refused_and_forgotten(server: Server) -> None:
    text = np.empty(1, object)
    text[0] = "\udcff"
    made = call(received("IN", "BYTES", text))

    with pytest.raises(UnicodeEncodeError):
        server.connection.begin(made)
    server.connection.end(made)
    server.connection.writer.send(("after",))

    assert server.receive().header == ("after",)


class Shuffling(threading.Thread):
    """Answers calls in random order, decoupled ones several times, and sends batches in between."""

    STREAMED = 3

    def __init__(self, server: Server, seed: int) -> None:
        super().__init__()
        self.server = server
        self.rng = random.Random(seed)
        self.open: list[tuple[int, float, int]] = []
        self.batches = 0

    def run(self) -> None:
        while True:
            message = self.server.receive()
            if message.header[0] == "end":
                return
            self.take(message)
            # Callers that have yet to send may wait for an answer: all is answered once nothing more is there.
            while self.open and not self.has_more():
                self.answer_one()

    def has_more(self) -> bool:
        return bool(self.server.waiting) or bool(select.select([self.server.incoming], [], [], 0)[0])

    def take(self, message: Incoming) -> None:
        _, number, _, _, _, decoupled, _, _, ((*_, placed),), released, _ = message.header
        value = float(np.frombuffer(message.find(placed), np.float32)[0])
        self.server.pool.release(released)
        self.server.send(("release", message.regions, []))
        self.open.append((number, value, self.STREAMED if decoupled else 1))

    def answer_one(self) -> None:
        number, value, left = self.open.pop(self.rng.randrange(len(self.open)))
        self.server.reply(number, ones(self.rng.choice([1, 5, LARGE]), value), left == 1)
        if left > 1:
            self.open.append((number, value, left - 1))
        if self.rng.random() < 0.1:
            self.batches += 1
            self.server.execute(self.batches, ones(LARGE, self.batches))


def outcomes_of(connection: WorkerConnection, made: ModelCall) -> list[float]:
    connection.begin(made)
    values = []
    final = False
    while not final:
        if not made.inbox.items:
            connection.wait(made.inbox)
        final = made.inbox.items[0][1]
        values.append(next_value(made))
    return values


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_call_at_once_and_each_gets_its_own_replies(server: Server, seed: int) -> None:
    failures: list[str] = []

    def work(index: int) -> None:
        rng = random.Random(index)
        for i in range(40):
            value, decoupled = float(index * 1000 + i), rng.random() < 0.25
            made = call(Tensor("IN", ones(rng.choice([1, LARGE]), value)), decoupled=decoupled)
            seen = outcomes_of(server.connection, made)
            if seen != [value] * (Shuffling.STREAMED if decoupled else 1):
                failures.append(f"{seen} for {value}")

    player = Shuffling(server, seed)
    workers = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(12)]
    for thread in (player, *workers):
        thread.start()
    for worker in workers:
        worker.join(200)
    stuck = [worker for worker in workers if worker.is_alive()]
    server.connection.writer.send(("end",))
    player.join(200)

    assert stuck == []
    assert failures == []
    server.connection.poll()
    numbers = [batch.number for _, batch, _ in server.connection.tasks.items]
    assert numbers == list(range(1, player.batches + 1))


def test_the_main_thread_waits_for_a_batch_while_others_call(server: Server) -> None:
    player = Shuffling(server, 0)
    player.start()
    values: list[list[float]] = []
    threads = [
        threading.Thread(
            target=lambda i=i: values.append(outcomes_of(server.connection, call(Tensor("IN", ones(1, i)))))
        )
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    server.send(("finalize",))

    server.connection.wait(server.connection.tasks)
    for thread in threads:
        thread.join(200)
    server.connection.writer.send(("end",))
    player.join(200)

    assert sorted(values) == [[float(i)] for i in range(6)]


# Questions, metrics and what is left for later


def test_questions_are_answered(server: Server) -> None:
    server.send(("answer", 1, ("ok", True)))
    assert server.connection.control("ready", "m", {"version": ""}) is True
    server.send(("answer", 2, ("error", TritonError.UNAVAILABLE, "explicit mode only")))
    with pytest.raises(TritonModelException, match="explicit mode only"):
        server.connection.control("load", "m", {})
    number = server.connection.make_number()
    server.send(("answer", number, ("ok", None)))
    server.connection.ask_metrics(("family", number, "n", "d", "counter"))

    assert server.receive().header == ("control", 1, "ready", "m", {"version": ""})
    assert server.receive().header == ("control", 2, "load", "m", {})
    assert server.receive().header == ("metrics", [("family", 3, "n", "d", "counter")])


def test_an_answer_that_came_before_it_was_waited_for_is_not_lost(server: Server) -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    server.connection.wait(inbox)
    inbox.wait()
    assert list(inbox.items) == [1]


def test_updates_of_metrics_are_sent_at_once(server: Server) -> None:
    for value in (0.0, 1.0):
        server.connection.metrics([("add", 1, value)])
        assert server.receive().header == ("metrics", [("add", 1, value)])


def test_what_a_finalizer_defers_is_sent_by_the_thread_that_sends(server: Server) -> None:
    connection = server.connection
    with connection.writer.lock:  # as if the finalizer had interrupted a thread that sends
        connection.later(lambda: connection.writer.send(("left",)))
        connection.writer.write(("sent",))
    connection.writer.send(("next",))

    assert [server.receive().header[0] for _ in range(3)] == ["sent", "next", "left"]


# The end


def test_everybody_who_waits_is_told_that_the_server_has_gone(server: Server) -> None:
    connection = server.connection
    made = [call(), call()]
    for each in made:
        connection.begin(each)
    waiting = threading.Thread(target=connection.wait, args=(made[0].inbox,))
    waiting.start()

    def ask() -> None:
        with pytest.raises(TritonModelException, match="the server has gone"):
            connection.control("ready", "m", {})

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(3):
        server.receive()

    server.hang_up()
    connection.wait(made[1].inbox)
    waiting.join(200)
    asking.join(200)

    assert not waiting.is_alive()
    assert not asking.is_alive()
    for each in made:
        assert [final for _, final in each.inbox.items] == [True]
        error = next_response(each).error()
        assert error is not None
        assert error.code() == TritonError.UNAVAILABLE
    assert list(connection.tasks.items) == [("end",)]
    connection.poll()
    with pytest.raises(Disconnected):
        connection.writer.send(("anything",))
    with pytest.raises(Disconnected):
        connection.wait(Inbox())


def test_bytes_that_are_no_message_end_the_connection(server: Server) -> None:
    server.out.sendall(b"\xff" * 64)

    with pytest.raises(ChannelError):
        server.connection.wait(server.connection.tasks)

    assert list(server.connection.tasks.items) == [("end",)]
