"""Idle slots, and which of them the next batch goes to. Pure."""


class IdleSlots:
    """Gives a batch a slot of the lane with the fewest batches; of equal lanes, that of the slot that was idle last.

    A lane may have several slots, with which it is kept supplied ahead of time. A batch must not stand in one lane's
    line while another lane has nothing to do.
    """

    __slots__ = ("_busy", "_idle")

    def __init__(self) -> None:
        self._idle: dict[int, dict[int, None]] = {}  # slots by lane, both with the one that became idle last at the end
        self._busy: dict[int, int] = {}  # lane by slot that was taken and has not come back

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._idle)

    def add(self, slot: int, lane: int) -> None:
        """A slot of this lane became idle."""
        self._busy.pop(slot, None)
        slots = self._idle.pop(lane, None)
        if slots is None:
            slots = {}
        slots[slot] = None
        self._idle[lane] = slots

    def remove(self, slot: int) -> None:
        """A slot cannot be used any more, idle or not."""
        self._busy.pop(slot, None)
        for lane, slots in self._idle.items():
            if slot in slots:
                del slots[slot]
                if not slots:
                    del self._idle[lane]
                return

    def take(self) -> int:
        """Return the slot for the next batch; there must be one."""
        lane = next(reversed(self._idle))
        if len(self._idle) > 1 and self._busy:
            busy = list(self._busy.values())
            lane = min(reversed(self._idle), key=busy.count)
        slots = self._idle[lane]
        slot, _ = slots.popitem()
        if not slots:
            del self._idle[lane]
        self._busy[slot] = lane
        return slot
