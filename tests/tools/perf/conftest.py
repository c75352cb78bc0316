import pytest

from charonia.tools.perf.observer import MachineWatch


@pytest.fixture(autouse=True)
def machine_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else the machine does must not decide on a verdict; `test_machine_load.py` tests how it is seen."""
    monkeypatch.setattr(MachineWatch, "load", lambda watch, begin_ns, end_ns: None)
