"""Stop strings: text that arrives in pieces ends before the first of them."""

from collections.abc import Sequence


class StopCutter:
    """Cuts text before the stop string that is complete first; of several that end together, before the longest.

    Attributes:
        is_cut: Whether a stop string was found; what follows is dropped.
    """

    __slots__ = ("_held", "_stops", "is_cut")

    def __init__(self, stops: Sequence[str]) -> None:
        """Make a cutter; `stops` has no empty string."""
        self._stops = tuple(stops)
        self._held = ""
        self.is_cut = False

    def take(self, piece: str) -> str:
        """Take a piece, and return the text that is certain by now."""
        if not self._stops:
            return piece
        if self.is_cut:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_cut = True
            self._held = ""
            return text[: min(found)[1]]
        end = len(text) - self._open(text)
        self._held = text[end:]
        return text[:end]

    def rest(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """Return the length of the longest end of a text that may be the beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
