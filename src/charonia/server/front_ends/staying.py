"""The sequences that stay with an engine when everything new goes to another one. Pure.

A front end sends a request where its sequence is, and the requests of one sequence may come through several front ends.
So each of them must know of a sequence that begins here after all, because its first request was on the way, and of one
that ends here, before the client has the answer and sends the next request.
"""

import itertools
from collections.abc import Iterable

from charonia.server.front_ends.reconnect import Sequence


class StayingSequences:
    """The sequences of an engine that has handed over, as its front ends know them.

    Args:
        sequences: Those that were open then.
    """

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        self._known = set(sequences)
        self._numbers = itertools.count()
        self._latest: dict[Sequence, int] = {}

    @property
    def ids(self) -> set[int | str]:
        """Their ids: several models may have sequences of one id, which all stay."""
        return {key for _, key in self._known}

    def came(self, sequence: Sequence) -> int:
        """Note a request of a sequence, and return its number."""
        number = self._latest[sequence] = next(self._numbers)
        return number

    def answered(
        self, sequence: Sequence, number: int, *, ends: bool, is_refused: bool
    ) -> tuple[int | str, bool] | None:
        """Note the answer of a request.

        Args:
            sequence: Its sequence.
            number: Its number.
            ends: Whether it is the last request of the sequence.
            is_refused: Whether it has failed.

        Returns:
            What front ends have to know before the client has the answer: the id, and whether its requests belong
            here; None for nothing new.
        """
        _, key = sequence
        was_here = key in self.ids
        is_latest = self._latest.get(sequence) == number
        if is_latest:
            del self._latest[sequence]
        if ends and is_latest:  # else it has begun again meanwhile
            self._known.discard(sequence)
        elif not ends and not is_refused:
            self._known.add(sequence)
        is_here = key in self.ids
        return (key, is_here) if is_here != was_here else None
