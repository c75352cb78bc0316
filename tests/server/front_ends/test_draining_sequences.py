"""Sequences that stay with an engine that has handed over: what its front ends have to know before clients do."""

from charonia.server.front_ends.hand_over import DrainingSequences

A, B = ("m", 7), ("other", 7)


def answer(draining: DrainingSequences, sequence: tuple[str, int], *, ends: bool = False, is_refused: bool = False):  # type: ignore[no-untyped-def]
    return draining.record_response(sequence, draining.record_request(sequence), ends=ends, is_refused=is_refused)


def test_a_sequence_that_ends_is_news_and_its_requests_before_are_none() -> None:
    draining = DrainingSequences([A])

    assert draining.ids == {7}
    assert answer(draining, A) is None
    assert answer(draining, A, ends=True) == (7, False)
    assert draining.ids == set()


def test_a_sequence_that_begins_here_after_all_is_news() -> None:
    draining = DrainingSequences([])

    assert answer(draining, A) == (7, True)
    assert answer(draining, A) is None


def test_a_request_that_is_refused_begins_nothing() -> None:
    assert answer(DrainingSequences([]), A, is_refused=True) is None


def test_an_id_stays_as_long_as_any_model_has_a_sequence_of_it() -> None:
    draining = DrainingSequences([A, B])

    assert answer(draining, A, ends=True) is None
    assert answer(draining, B, ends=True) == (7, False)


def test_a_sequence_that_has_begun_again_before_its_end_is_answered_stays() -> None:
    draining = DrainingSequences([A])
    end = draining.record_request(A)
    again = draining.record_request(A)

    assert draining.record_response(A, end, ends=True, is_refused=False) is None
    assert draining.record_response(A, again, ends=False, is_refused=False) is None
    assert draining.ids == {7}
