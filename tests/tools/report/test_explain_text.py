"""The text of `charonia explain`."""

from dataclasses import replace

from charonia.cli.explain import explain_text
from charonia.config.parameters import InstanceBounds
from charonia.server.explain.explainer import Explanation, ProcessHistory, explanation_json
from charonia.server.explain.rules import Activity, Counts, Facts, ModelSetup
from charonia.server.lifecycle.front_end_placement import ExecutionPlacement
from charonia.server.metrics.model_metrics import FailureReason
from charonia.server.scheduling.api import CloseReason

MS = 1_000_000
SETUP = ModelSetup(
    "classifier", "1", instances=2, threads=1, cores=4, batch_max=8, batches=True, delay_us=500, preferred=(8,)
)
BUSY = Activity(
    60.0,
    30.0,
    Counts(
        success=12_000,
        hits=500,
        failed={FailureReason.REJECTED: 7, FailureReason.BACKEND: 1},
        inferences=12_000,
        batches={1: 1000, 8: 1000},
        closes={CloseReason.FULL: 1500, CloseReason.DELAY: 500},
        request_ns=12_000 * 30 * MS,
        queue_ns=12_000 * 10 * MS,
        infer_ns=58_000 * MS,
        moving_ns=1_000 * MS,
        waits=(0, 12_000, 0),
    ),
    (5 * MS, 15 * MS),
    (0, 4, 40, 2),
    1.2,
)


def text_of(explanation: Explanation, columns: int = 110) -> list[str]:
    return explain_text(explanation_json(explanation), columns).splitlines()


def test_everything_is_there_and_findings_come_first() -> None:
    lines = text_of(Explanation.of(Facts(SETUP, BUSY)))

    assert lines[0] == "classifier, version 1, in the last 60 s, 30 s of them with requests"
    assert lines[2].startswith("1. 1 request (less than 1%) failed in the model.")
    assert "   -> try instance_group [ { count: 3 } ] in place of 2" in lines
    assert "Requests     12,000 answered (400 a second), 7 refused, 1 failed in the model, 500 from the cache" in lines
    assert "Queue        2 waiting now, 40 at most" in lines
    assert "Time         30 ms a request: 10 ms in the queue (99% up to 14.9 ms), then 20 ms" in lines
    assert "Batches      2,000, of 4.5 elements on average" in lines
    assert "  of 8  ############              50%" in lines
    assert "  the batch was full       ##################        75%" in lines
    assert "Instances    2 on the CPU, 1 thread each, busy 98% of the time" in lines
    assert "Cores        4, 1.2 of them idle" in lines
    assert lines[-1] == (
        "Settings     max_batch_size 8, dynamic batching, max_queue_delay_microseconds 500, preferred_batch_size [8]"
    )
    assert not any(line.startswith("Scaling") for line in lines)


def test_instances_by_load_have_a_line_of_their_own() -> None:
    scaled = replace(SETUP, bounds=InstanceBounds(1, 4), scaling="2 of 1 to 4 instances; a second was added 9 s ago")

    assert "Scaling      2 of 1 to 4 instances; a second was added 9 s ago" in text_of(
        Explanation.of(Facts(scaled, BUSY))
    )


def test_what_the_rate_limiter_held_back_has_a_line() -> None:
    short = replace(BUSY, short=0.75, resources=("memory", "disk"), holders=("big", "classifier"))

    line = "Resources    memory, disk, waited for 75% of the time; held by big, classifier"
    assert line in text_of(Explanation.of(Facts(SETUP, short)))
    assert line.partition(";")[0] in text_of(Explanation.of(Facts(SETUP, replace(short, holders=()))))
    assert not any(each.startswith("Resources") for each in text_of(Explanation.of(Facts(SETUP, BUSY))))


def test_processes_that_were_started_again_have_a_line() -> None:
    processes = (
        ProcessHistory("engine", 1234.5, 2, "SIGKILL"),
        ProcessHistory("front_end_0", 1300.0, 0, ""),
        ProcessHistory("front_end_1", 0.0, 1, "exit status 1"),
    )

    lines = text_of(replace(Explanation.of(Facts(SETUP, BUSY)), processes=processes))

    assert lines[-2:] == [
        "Processes    engine up 1,234 s, started again 2 times; its last end: SIGKILL",
        "             front_end_1 not running, started again 1 time; its last end: exit status 1",
    ]


def test_lines_keep_to_the_width_of_the_terminal() -> None:
    lines = text_of(Explanation.of(Facts(SETUP, BUSY)), columns=50)

    begin = lines.index("") + 1
    findings = lines[begin : lines.index("", begin)]
    assert len(findings) > 5
    assert max(map(len, lines)) <= 50
    assert "             (99% up to 14.9 ms), then 20 ms" in lines


def test_a_model_without_requests_or_batching_has_little_to_show() -> None:
    bare = ModelSetup("m", "2", instances=1, on_gpu=True, cores=1)

    lines = text_of(Explanation.of(Facts(bare, Activity(3.0, 3.0))))

    assert lines == [
        "m, version 2, in the last 3 s",
        "",
        "No request ended in this time: there is nothing to explain.",
        "-> send some load",
        "",
        "Instances    1 on the GPU, busy 0% of the time",
        "Cores        1, 0.0 of them idle",
        "Settings     max_batch_size 0, no dynamic batching",
    ]


def test_a_model_that_was_just_loaded_has_no_time() -> None:
    assert text_of(Explanation.of(Facts(SETUP, Activity())))[0] == "classifier, version 1"


def test_batches_in_the_line_of_an_instance_are_told() -> None:
    counts = replace(BUSY.counts, infer_ns=150_000 * MS)

    lines = text_of(Explanation.of(Facts(replace(SETUP, batches=False), replace(BUSY, counts=counts))))

    assert "             2.5 batches per instance at a time, all but one queued" in lines
    assert "Sent because" not in lines


def test_only_failures_are_shown_without_times() -> None:
    counts = Counts(failed={FailureReason.OTHER: 3})

    lines = text_of(Explanation.of(Facts(SETUP, replace(BUSY, counts=counts))))

    assert "Requests     0 answered (0 a second), 3 failed otherwise" in lines
    assert not any(line.startswith(("Time", "Batches")) for line in lines)


def test_an_ensemble_shows_its_steps_in_place_of_instances() -> None:
    step = Explanation.of(Facts(SETUP, BUSY))
    ensemble = ModelSetup("both", "1", instances=0, cores=4, steps=("classifier",))
    counts = Counts(success=10, request_ns=20 * MS)

    lines = text_of(Explanation.of(Facts(ensemble, replace(BUSY, counts=counts), ("classifier", 0.98)), (step,)))

    assert lines[-2:] == [
        "Steps",
        "  classifier  busy  98% of 2 instances, 30 ms a request, 10 ms of it in the queue",
    ]
    assert not any(line.startswith("Instances") for line in lines)


def test_without_preferred_sizes_none_are_named() -> None:
    lines = text_of(Explanation.of(Facts(replace(SETUP, preferred=()), BUSY)))

    assert lines[-1].endswith("max_queue_delay_microseconds 500")


def test_it_says_where_a_model_runs_if_front_ends_are_processes() -> None:
    def last_line(where: ExecutionPlacement | None) -> str:
        return text_of(Explanation.of(Facts(replace(SETUP, placement=where), BUSY)))[-1]

    assert last_line(None).startswith("Settings")
    assert last_line(ExecutionPlacement(2, "")) == "Runs in      2 front ends"
    assert last_line(ExecutionPlacement(0, "")) == "Runs in      the engine: no front end has loaded it"
    assert last_line(ExecutionPlacement(0, "it is decoupled")) == "Runs in      the engine only: it is decoupled"
