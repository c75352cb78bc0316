"""A place where a model runs, whatever it takes."""

from charonia.server.scheduling.in_place import InPlaceRule


class FixedPlace(InPlaceRule):
    """Measures nothing: every execution runs in place, or none."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def ran_in_place(self, duration_ns: int, cpu_ns: int, *, has_waited: bool = False) -> None:
        """Stay."""

    def ran_in_thread(self, duration_ns: int, cpu_ns: int, passed_on_ns: int = 0) -> None:
        """Stay."""
