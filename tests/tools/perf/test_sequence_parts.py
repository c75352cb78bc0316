from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from charonia.core.request import InferRequest
from charonia.tools.perf.api import SequencePlan
from charonia.tools.perf.sequences import Part, SequenceIds, SequenceSlot, steps


class Data:
    batch_size = 1

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.stream_count = len(lengths)

    def step_count(self, stream: int) -> int:
        return self.lengths[stream]

    def request(self, stream: int, step: int) -> InferRequest:
        return InferRequest("model", {})

    def expected(self, stream: int, step: int) -> None:
        return None


def slot(plan: SequencePlan, *lengths: int) -> SequenceSlot:
    return SequenceSlot(plan, Data(*lengths or (1,)), SequenceIds(plan, 0, 1), seed=1)


def sequence(of: SequenceSlot) -> list[Part]:
    parts = [of.next()]
    while not parts[-1].end:
        parts.append(of.next())
    return parts


def test_steps_go_through_all_streams_over_and_over() -> None:
    found = [(part.stream, part.step) for part in islice(steps(Data(2, 1), 0, 1), 5)]

    assert found == [(0, 0), (0, 1), (1, 0), (0, 0), (0, 1)]


def test_processes_interleave_their_steps() -> None:
    found = [[part.step for part in islice(steps(Data(3), process, 2), 3)] for process in (0, 1)]

    assert found == [[0, 2, 1], [1, 0, 2]]


def test_a_sequence_starts_once_ends_once_and_keeps_its_id() -> None:
    parts = sequence(slot(SequencePlan(length=4, variation=0.0, first_id=9), 3))

    assert [(part.start, part.end) for part in parts] == [(True, False), (False, False), (False, False), (False, True)]
    assert {part.sequence_id for part in parts} == {9}
    assert [part.step for part in parts] == [0, 1, 2, 0]


@given(st.integers(1, 50), st.floats(0, 1))
def test_lengths_stay_within_the_variation(length: int, variation: float) -> None:
    of = slot(SequencePlan(length=length, variation=variation))

    for _ in range(5):
        count = len(sequence(of))
        assert max(1, length - int(length * variation)) <= count <= length + int(length * variation)


def test_a_length_may_come_from_the_data() -> None:
    of = slot(SequencePlan(length_from_data=True), 2, 5)

    assert {len(sequence(of)) for _ in range(20)} == {2, 5}


def test_an_open_sequence_is_finished_with_an_end() -> None:
    of = slot(SequencePlan(length=5, variation=0.0))
    assert of.finish() is None
    of.next()

    part = of.finish()

    assert part is not None
    assert part.end
    assert not of.is_open
    assert of.next().start


def test_a_sequence_that_is_given_up_makes_room_for_a_new_one() -> None:
    of = slot(SequencePlan(length=5, variation=0.0))
    of.next()

    of.abandon()
    of.abandon()

    part = of.next()
    assert (part.start, part.sequence_id) == (True, 2)


def test_ids_come_again_but_never_while_they_are_in_use() -> None:
    ids = SequenceIds(SequencePlan(first_id=10, id_count=3), 0, 1)
    taken = [ids.take(), ids.take()]
    ids.release(10)

    assert taken == [10, 11]
    assert [ids.take(), ids.take()] == [12, 10]
    ids.release(12)
    assert ids.take() == 12
    assert ids.take() == 10  # all are in use


def test_processes_share_out_the_ids() -> None:
    plan = SequencePlan(first_id=1, id_count=4)
    one, two = SequenceIds(plan, 0, 2), SequenceIds(plan, 1, 2)

    assert [[one.take(), one.take()], [two.take(), two.take()]] == [[1, 3], [2, 4]]
