from charonia.server.backends.workers.instance import PROBLEM_CHARS_MAX, RESTART_DELAY_S_MAX, WorkerHealth


def test_pauses_double_up_to_a_limit_until_a_batch_is_answered() -> None:
    health = WorkerHealth()

    pauses = [health.ended("it died") for _ in range(40)]

    assert pauses[:4] == [0.05, 0.1, 0.2, 0.4]
    assert pauses[-1] == RESTART_DELAY_S_MAX
    health.answered()
    assert health.ended("it died") == 0.05


def test_a_problem_lasts_until_the_worker_is_ready() -> None:
    health = WorkerHealth()
    assert health.problem == ""

    health.ended("exit status 3")
    health.restarted()

    assert health.problem == "its worker has ended and is started again after 0.05 s: exit status 3"
    assert health.ready()
    assert health.problem == ""
    assert not health.ready()
    assert health.restarts == 1


def test_a_worker_that_fails_to_start_three_times_in_a_row_cannot_be_started() -> None:
    health = WorkerHealth()
    for _ in range(5):
        health.ended("it died while it worked")
    found = []
    for _ in range(3):
        health.ended("ImportError", failed_to_start=True)
        found.append(health.is_failing)
    health.ready()

    assert found == [False, False, True]
    assert not health.is_failing


def test_a_worker_that_keeps_dying_is_named_as_such() -> None:
    health = WorkerHealth()

    for _ in range(3):
        health.ended("exit status 3")
        health.restarted()

    assert health.problem.startswith("its worker has ended 3 times in a row without an answer")
    assert "after 0.2 s: exit status 3" in health.problem


def test_of_a_long_reason_both_ends_are_kept() -> None:
    health = WorkerHealth()

    health.ended("begin" + "x" * 100_000 + "end")

    assert "begin" in health.problem
    assert health.problem.endswith("end")
    assert len(health.problem) < PROBLEM_CHARS_MAX + 200
