from fuzz.fuzz_pbtxt import run

CASES = 300


def test_mutated_configurations_are_read_or_refused_cleanly() -> None:
    assert run(2026, cases=CASES) == CASES


def test_a_run_stops_when_its_time_is_over() -> None:
    assert run(2026, seconds=0.0) == 0
