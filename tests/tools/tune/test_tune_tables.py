"""Tables and summary of a run, and its JSON."""

import csv
from dataclasses import replace

import pytest
from tests.support.runs import synthetic_run
from tests.support.tune_runs import synthetic_tune_run

from charonia.core.errors import ServingError
from charonia.tools.results.records import (
    ClientTimes,
    Estimate,
    Gpu,
    LevelResult,
    LoadMode,
    Machine,
    ServerInfo,
    ServerModel,
    ServerSide,
)
from charonia.tools.tune.api import (
    Constraint,
    Goal,
    LoadPoint,
    Measured,
    Metric,
    ModelChange,
    ModelGoal,
    SearchOptions,
    Skipped,
    Trial,
    TrialFailed,
    TrialRecord,
    Variant,
)
from charonia.tools.tune.decision import decide
from charonia.tools.tune.result import (
    GroupRecord,
    ModelConfigRecord,
    TuneRun,
    VariantRecord,
    exit_status,
    from_json,
    to_json,
)
from charonia.tools.tune.tables import gpu_csv, inference_csv, server_csv, summary

HEADER = (
    "Model,Batch,Concurrency,Model Config Path,Instance Group,Max Batch Size,Satisfies Constraints,"
    "Throughput (infer/sec),p99 Latency (ms)"
)
GPU = Gpu("GPU-1", 0.5, 70.0, 1e9, 16e9)
DEFAULT, TWO = Variant(), Variant((ModelChange("m", instance_count=2),))


def estimate(value: float) -> Estimate:
    return Estimate(value, value * 0.99, value * 1.01)


def level(gpus: tuple[Gpu, ...] = ()) -> LevelResult:
    return replace(synthetic_run().levels[0], gpus=gpus)


def trial(number: int, variant: Variant, load: float, rate: float, p99: float, *, repeat: int = 0) -> TrialRecord:
    metrics = {"m": {"perf_throughput": estimate(rate), "perf_latency_p99": estimate(p99)}}
    point = LoadPoint("m", LoadMode.CONCURRENCY, load)
    return TrialRecord(
        Trial(number, variant, (point,), repeat, 1.0, "test"), Measured(metrics, 1.0), levels={"m": level((GPU,))}
    )


def config(name: str, instances: str, diff: str = "") -> ModelConfigRecord:
    return ModelConfigRecord("m", name, "max_batch_size: 8\n", diff, instances, 8, parameters={"threads": "2"})


def group(*trials: TrialRecord, constraints: tuple[Constraint, ...] = ()) -> GroupRecord:
    goal = Goal((ModelGoal("m", constraints=constraints),))
    return GroupRecord(
        goal=goal,
        decision=decide(goal, trials, SearchOptions()),
        variants=(
            VariantRecord(DEFAULT, "m_config_default", (config("m_config_default", "1:CPU"),)),
            VariantRecord(TWO, "m_config_0", (config("m_config_0", "2:CPU", "--- a\n+++ b\n@@ -1 +1 @@\n+count: 2"),)),
        ),
        trials=trials,
        skipped=(Skipped(Variant((ModelChange("m", instance_count=9),)), "no room\nat all"),),
        duration_s=12.0,
    )


def run(*groups: GroupRecord) -> TuneRun:
    machine = Machine("host", "Linux", "A processor", 4, 2**34, "3.11")
    server = ServerInfo("http://localhost:8000", "http", "triton", "2.51")
    return TuneRun("charonia 1", "2026-01-02T03:04:05+00:00", 13.0, machine, server, False, {"seed": "0"}, 0, groups)


TRIALS = (
    trial(1, DEFAULT, 1, 90.04, 1.04),
    trial(2, DEFAULT, 2, 100.0, 2.0),
    trial(3, TWO, 1, 95.0, 1.0),
    trial(4, TWO, 2, 200.0, 1.5),
    trial(5, TWO, 2, 204.0, 1.5, repeat=1),
    trial(6, DEFAULT, 2, 100.0, 2.0, repeat=1),
    trial(7, TWO, 2, 202.0, 1.5, repeat=2),
    trial(8, DEFAULT, 2, 100.0, 2.0, repeat=2),
)


def test_the_table_has_the_known_header_and_the_best_configuration_first() -> None:
    text = inference_csv([group(*TRIALS)])

    assert text.splitlines()[0] == HEADER
    assert text.splitlines()[1:-1] == [
        "m,1,2,m_config_0,2:CPU,8,Yes,203.0,1.5",
        "m,1,1,m_config_0,2:CPU,8,Yes,95.0,1.0",
        "m,1,2,m_config_default,1:CPU,8,Yes,100.0,2.0",
        "m,1,1,m_config_default,1:CPU,8,Yes,90.0,1.0",
    ]
    assert text.endswith("\n\n")


def test_what_misses_a_constraint_says_so_and_comes_last() -> None:
    limited = group(*TRIALS, constraints=(Constraint(Metric.LATENCY_P99, maximum=1.2),))

    rows = list(csv.DictReader(inference_csv([limited]).splitlines()[:-1]))

    assert [row["Satisfies Constraints"] for row in rows] == ["Yes", "No", "Yes", "No"]


def test_columns_may_be_chosen() -> None:
    text = inference_csv(
        [group(*TRIALS)], ["model_name", "perf_server_queue", "cpu_used_ram", "backend_parameter/threads"]
    )

    assert text.splitlines()[0] == "Model,Server Queue time (ms),RAM Usage (MB),backend_parameter/threads"
    assert text.splitlines()[1].startswith("m,")
    assert text.splitlines()[1].endswith(",,2")


def test_times_of_client_and_server_are_means_over_the_trials_in_ms() -> None:
    model = ServerModel("m", "1", 2, 2, 2, 0, 0, 8_000_000, 2_000_000, 6_000_000, 4_000_000, queue_count=2)
    one, other = (
        replace(level(), client=ClientTimes(send_ns, 500_000, 0, 0, 1), server=ServerSide(model, False))
        for send_ns in (1_000_000, 2_000_000)
    )
    trials = (replace(TRIALS[3], levels={"m": one}), replace(TRIALS[4], levels={"m": other}))
    names = ["client_send_recv", "client_response_wait", "server_queue"]
    names += [f"server_compute_{part}" for part in ("input", "infer", "output")]

    text = inference_csv([group(*trials)], [f"perf_{name}" for name in names])

    mean_ms = level().service_times.mean / 1e6
    wait_ms = (max(0, mean_ms - 1.5) + max(0, mean_ms - 2.5)) / 2
    assert text.splitlines()[1] == f"2.0,{wait_ms:.1f},4.0,1.0,3.0,2.0"


def test_request_rates_have_a_column_of_their_own() -> None:
    rated = replace(TRIALS[0], trial=replace(TRIALS[0].trial, loads=(LoadPoint("m", LoadMode.REQUEST_RATE, 50.0),)))

    text = inference_csv([group(rated)])

    assert text.splitlines()[0].startswith("Model,Batch,Request Rate,")
    assert text.splitlines()[1].startswith("m,1,50,")


def test_gpus_have_tables_and_without_any_there_are_none() -> None:
    assert gpu_csv([group(*TRIALS)]).splitlines()[:2] == [
        "Model,GPU UUID,Batch,Concurrency,Model Config Path,Instance Group,Satisfies Constraints,"
        "GPU Memory Usage (MB),GPU Utilization (%),GPU Power Usage (W)",
        "m,GPU-1,1,2,m_config_0,2:CPU,Yes,1000.0,50.0,70.0",
    ]
    assert server_csv([GPU]).splitlines() == [
        "Model,GPU UUID,GPU Memory Usage (MB),GPU Utilization (%),GPU Power Usage (W)",
        "triton-server,GPU-1,1000.0,50.0,70.0",
        "",
    ]
    assert gpu_csv([group(replace(TRIALS[0], levels={"m": level()}))]) == ""
    assert server_csv([]) == ""


def test_the_summary_has_the_verdict_the_change_and_what_was_left_out() -> None:
    assert summary(run(group(*TRIALS))).splitlines() == [
        "m: 8 measurements of 2 configurations in 12 s",
        "",
        "'2 instances' is 103 % (93.8 to 113 %) better than the default configuration.",
        "",
        "configuration     instances  batch  delay  load           infer/s   p99 ms     memory  over default",
        "---------------------------------------------------------------------------------------------------------",
        "> config_0        2:CPU      8      -      concurrency 2  203 ±1 %  1.50 ±1 %          +103 % [+94, +113]",
        "  config_default  1:CPU      8      -      concurrency 2  100 ±1 %  2.00 ±1 %",
        "",
        "Change of m (m_config_0/config.pbtxt):",
        "  @@ -1 +1 @@",
        "  +count: 2",
        "",
        "Not measured:",
        "  9 instances: no room",
    ]


def test_the_summary_of_several_models_has_their_best_in_one_table_and_says_why_it_ended() -> None:
    reasons = ["no room", "b", "c", "no room", "d", "e", "f", "g", ""]
    skipped = [Skipped(Variant((ModelChange("m", instance_count=10 + n),)), each) for n, each in enumerate(reasons)]
    worse = replace(group(*TRIALS[1:3]), skipped=tuple(skipped))
    resumed = replace(worse, trials=tuple(replace(each, is_resumed=True) for each in TRIALS[1:3]))
    both = run(group(*TRIALS), resumed)

    blocks = summary(replace(both, problem="lost"), 1, top_configs=3).split("\n\n")

    assert blocks[5] == "m: 2 measurements of 2 configurations in 12 s, 2 of them from the journal"
    assert blocks[8].splitlines() == [
        "Not measured:",
        "  10 instances and 1 other configuration: no room",
        *(
            f"  {count} instances: {reason}"
            for count, reason in ((11, "b"), (12, "c"), (14, "d"), (15, "e"), (16, "f"))
        ),
        "  and 2 other reasons",
    ]
    assert [line.split()[:2] for line in blocks[9].splitlines()[2:]] == [
        [">", "config_0"],
        ["config_default", "1:CPU"],
        [">", "config_default"],
    ]
    assert blocks[10] == "The run ended early: lost. The measurements are kept; the same command resumes."
    assert summary(replace(both, is_interrupted=True)).endswith(
        "\n\nInterrupted. The measurements are kept; the same command resumes."
    )
    tables = [summary(each, top_configs=count).count("infer/s") for each in (run(worse), both) for count in (0, 3)]
    assert tables == [1, 1, 2, 3]


def test_the_summary_shows_the_variants_that_were_asked_for() -> None:
    lines = summary(run(group(*TRIALS)), names=("m_config_default",)).splitlines()

    assert any(line.strip().startswith("config_default") for line in lines)
    assert not any(line.startswith("> config_0") for line in lines)


def test_the_table_of_the_summary_fits_a_terminal_and_goes_by_short_names() -> None:
    lines = summary(synthetic_tune_run("densenet_onnx", latency_max_ms=20)).splitlines()
    rule = next(index for index, line in enumerate(lines) if line.startswith("----"))

    assert len(lines[rule]) <= 120
    assert lines[rule + 1].startswith("> config_")
    assert summary(run(group(*TRIALS)), names=("config_0",)) == summary(run(group(*TRIALS)), names=("m_config_0",))


def test_a_run_comes_back_from_its_json() -> None:
    failed = TrialRecord(Trial(9, TWO, TRIALS[0].trial.loads, 0, 0.5, "x"), failed=TrialFailed("lost", True, 1.0))
    before = run(group(*TRIALS, failed))

    assert from_json(to_json(before)) == before


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": "charonia-tune", "version": 9}', '{"format": "charonia-tune", "version": 1}']
)
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ServingError, match="here"):
        from_json(text, "here")


def test_the_exit_status_is_that_of_the_worst_model() -> None:
    good = group(*TRIALS)
    unmet = group(*TRIALS, constraints=(Constraint(Metric.THROUGHPUT, minimum=1e9),))
    nothing = group(replace(TRIALS[0], measured=None, failed=TrialFailed("no")))

    assert exit_status(run(good)) == 0
    assert exit_status(run(good, unmet)) == 2
    assert exit_status(run(unmet, nothing)) == 3
    assert exit_status(run()) == 3
    assert exit_status(replace(run(good), problem="lost")) == 1
    assert exit_status(replace(run(good), is_interrupted=True)) == 130
