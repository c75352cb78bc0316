"""Sequences that stay with an engine that has handed over: what its front ends have to know before clients do."""

from charonia.server.front_ends.hand_over import StayingSequences

A, B = ("m", 7), ("other", 7)


def answer(staying: StayingSequences, sequence: tuple[str, int], *, ends: bool = False, is_refused: bool = False):  # type: ignore[no-untyped-def]
    return staying.answered(sequence, staying.came(sequence), ends=ends, is_refused=is_refused)


def test_a_sequence_that_ends_is_news_and_its_requests_before_are_none() -> None:
    staying = StayingSequences([A])

    assert staying.ids == {7}
    assert answer(staying, A) is None
    assert answer(staying, A, ends=True) == (7, False)
    assert staying.ids == set()


def test_a_sequence_that_begins_here_after_all_is_news() -> None:
    staying = StayingSequences([])

    assert answer(staying, A) == (7, True)
    assert answer(staying, A) is None


def test_a_request_that_is_refused_begins_nothing() -> None:
    assert answer(StayingSequences([]), A, is_refused=True) is None


def test_an_id_stays_as_long_as_any_model_has_a_sequence_of_it() -> None:
    staying = StayingSequences([A, B])

    assert answer(staying, A, ends=True) is None
    assert answer(staying, B, ends=True) == (7, False)


def test_a_sequence_that_has_begun_again_before_its_end_is_answered_stays() -> None:
    staying = StayingSequences([A])
    end = staying.came(A)
    again = staying.came(A)

    assert staying.answered(A, end, ends=True, is_refused=False) is None
    assert staying.answered(A, again, ends=False, is_refused=False) is None
    assert staying.ids == {7}
