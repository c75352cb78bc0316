"""Stop strings are found wherever pieces begin and end."""

from hypothesis import given
from hypothesis import strategies as st

from charonia.wire.openai_answer import StopCutter

TEXT = st.text("ab c", max_size=12)
STOPS = st.lists(st.text("ab c", min_size=1, max_size=4), max_size=3)


def whole(text: str, stops: list[str]) -> str:
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(st.lists(TEXT, max_size=8), STOPS)
def test_pieces_are_cut_as_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    cutter = StopCutter(stops)

    released = [cutter.take(piece) for piece in pieces]

    assert "".join(released) + cutter.rest() == whole("".join(pieces), stops)
    assert cutter.is_cut == (whole("".join(pieces), stops) != "".join(pieces))


@given(st.lists(TEXT, max_size=8), STOPS)
def test_no_more_is_held_back_than_a_stop_string_may_need(pieces: list[str], stops: list[str]) -> None:
    cutter = StopCutter(stops)
    received = released = ""
    for piece in pieces:
        received += piece
        released += cutter.take(piece)
        if not cutter.is_cut:
            held = received[len(released) :]
            assert not held or any(stop.startswith(held) for stop in stops)


def test_a_letter_that_begins_no_stop_string_leaves_at_once() -> None:
    cutter = StopCutter(["\nUser:"])

    assert [cutter.take(piece) for piece in ("Hi", "\n", "Us", "age", "\nUser", ": more", "x")] == [
        *("Hi", "", "", "\nUsage", "", "", "")
    ]
    assert cutter.is_cut
