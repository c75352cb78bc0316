import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from tests.support.report_page import HOSTILE, Page, check_closed, check_hostile
from tests.support.tune_runs import synthetic_tune_run

from charonia.tools.results.records import Gpu
from charonia.tools.tune.api import (
    Constraint,
    Goal,
    Measured,
    Metric,
    ModelChange,
    ModelGoal,
    Objective,
    Skipped,
    TrialFailed,
    TrialRecord,
    Variant,
)
from charonia.tools.tune.decision import Decision
from charonia.tools.tune.report.html import ROWS_MAX, goal_text, render, settings_of, value_text
from charonia.tools.tune.result import GroupRecord, TuneRun, VariantRecord


@cache
def better_run() -> TuneRun:
    return synthetic_tune_run(latency_max_ms=60.0)


def group_of(run: TuneRun) -> GroupRecord:
    return run.groups[0]


def with_group(run: TuneRun, **changes: object) -> TuneRun:
    return replace(run, groups=(replace(run.groups[0], **changes),))  # type: ignore[arg-type]  # fields of the record


def hostile_run() -> TuneRun:
    run = synthetic_tune_run(HOSTILE, latency_max_ms=60.0)
    group = group_of(run)
    first, *others = group.trials
    assert first.measured is not None
    failed = replace(first.trial, number=999, purpose=HOSTILE)
    return replace(
        with_group(
            run,
            trials=(
                replace(first, measured=replace(first.measured, notes=(HOSTILE,))),
                *others,
                TrialRecord(failed, failed=TrialFailed(HOSTILE)),
            ),
            variants=tuple(_hostile_variant(record) for record in group.variants),
            skipped=(Skipped(Variant((ModelChange(HOSTILE, instance_count=9),)), HOSTILE),),
            notes=(HOSTILE,),
        ),
        tool=HOSTILE,
        began_at=HOSTILE,
        options={HOSTILE: HOSTILE},
        command=HOSTILE,
        notes=(HOSTILE,),
        problem=HOSTILE,
        is_remote=True,
        idle_gpus=(Gpu(HOSTILE, 0.5, 100.0, 2**30, 2**33),),
        server=replace(run.server, url=HOSTILE, name=HOSTILE, version=HOSTILE),
        machine=replace(run.machine, host=HOSTILE, system=HOSTILE, processor=HOSTILE, python=HOSTILE),
    )


def _hostile_variant(record: VariantRecord) -> VariantRecord:
    configs = tuple(replace(config, name=HOSTILE, text=HOSTILE, diff=f"+{HOSTILE}") for config in record.configs)
    return replace(record, name=HOSTILE, configs=configs)


def test_the_recommendation_comes_first_with_its_gain_and_its_change() -> None:
    page = Page(render(better_run()))

    sentence = r"'4 instances, 1 thread each.*' is \S+ % \(\S+ to \S+ %\) better than the default configuration"
    begin = re.search(sentence, page.text)
    assert begin
    assert "p99 latency at most 60.0 ms" in page.text
    change = page.text.index("+instance_group {")
    assert begin.start() < change < page.text.index("Configurations compared") < page.text.index("Environment")
    assert ("ins", {}) in page.elements


def test_hostile_names_are_text_wherever_they_stand() -> None:
    hostile = Page(render(hostile_run()))

    check_hostile(Page(render(better_run())), hostile)
    assert hostile.data["groups"][0]["models"] == [HOSTILE]


def test_the_page_loads_nothing_and_runs_only_its_own_script() -> None:
    check_closed(render(better_run()))


def test_every_variant_has_a_section_that_links_lead_to() -> None:
    page = Page(render(better_run()))

    links = {str(a["href"])[1:] for tag, a in page.elements if tag == "a"}
    sections = {a["id"] for tag, a in page.elements if tag == "details" and "id" in a}
    assert links <= page.ids
    assert len(sections) == len(group_of(better_run()).variants)


def test_what_is_compared_is_the_best_first_and_the_rest_folded_away() -> None:
    page = Page(render(better_run()))
    variants = page.data["groups"][0]["variants"]

    assert variants[0]["role"] == "recommended"
    assert [variant["role"] for variant in variants].count("recommended") == 1
    assert sum(variant["default"] for variant in variants) == 1
    assert f"{sum(variant['best'] >= 0 for variant in variants) - ROWS_MAX} more" in page.text


def test_each_variant_that_matters_has_a_colour_of_its_own() -> None:
    page = render(better_run())
    (group,) = Page(page).data["groups"]
    shades = [variant["shade"] for variant in group["variants"] if variant["shade"]]
    phases = [shade for _, shade in group["phases"]]

    assert (group["variants"][0]["shade"], group["variants"][0]["label"][-14:]) == ("s0", " (recommended)")
    assert [variant["shade"] for variant in group["variants"] if variant["default"]] == ["s5"]
    assert len(shades) == len(set(shades)) == 5
    assert {purpose for purpose, _ in group["phases"]} == {trial["purpose"] for trial in group["trials"]}
    for name in (*shades, *phases, *(f"p-{part}" for part, _ in Page(page).data["parts"])):
        assert f"--{name}: #" in page.decode(), "a colour of the style sheet"


def test_points_of_the_plots_are_what_was_measured() -> None:
    run = better_run()
    best = group_of(run).decision.best
    assert best is not None

    shown = Page(render(run)).data["groups"][0]["variants"][0]
    load = shown["loads"][shown["best"]]
    metrics = best.metrics["mlp"]
    assert load["text"] == str(best.loads[0])
    assert load["of"][0]["throughput"][0] == pytest.approx(metrics[Metric.THROUGHPUT].value, abs=0.01)
    assert load["of"][0]["p99"][0] == pytest.approx(1e6 * metrics[Metric.LATENCY_P99].value, abs=0.01)
    assert load["count"] == len(best.trial_numbers)


def test_limits_are_lines_in_the_unit_of_their_axis() -> None:
    goal = ModelGoal("mlp", constraints=(Constraint(Metric.LATENCY_P99, maximum=60), Constraint(Metric.THROUGHPUT, 5)))
    run = with_group(better_run(), goal=Goal((goal,)))

    limits = Page(render(run)).data["groups"][0]["limits"][0]
    assert [(limit["metric"], limit["value"], limit["text"]) for limit in limits] == [
        ("p99", 60e6, "at most 60.0 ms"),
        ("perf_throughput", 5, "at least 5.00/s"),
    ]


def test_the_search_is_a_row_of_trials_without_gaps() -> None:
    trials = Page(render(better_run())).data["groups"][0]["trials"]

    assert trials[0]["begin"] == 0
    assert all(after["begin"] == before["end"] for before, after in pairwise(trials))
    assert len(trials) == len(group_of(better_run()).trials)


def test_without_a_gain_the_default_is_recommended_and_nothing_is_to_be_changed() -> None:
    page = Page(render(synthetic_tune_run(noise=3.0, has_levels=False)))
    first = page.data["groups"][0]["variants"][0]

    assert "No significant gain over the default configuration" in page.text
    assert (first["role"], first["default"]) == ("recommended", True)
    assert "Change of" not in page.text


def test_constraints_that_no_variant_keeps_show_the_closest_one() -> None:
    page = Page(render(synthetic_tune_run(latency_max_ms=1.0)))

    assert "limits not met" in page.text
    assert "The closest is" in page.text
    assert page.data["groups"][0]["variants"][0]["role"] == "closest"
    assert "Change of" not in page.text


def test_failures_and_variants_left_out_are_listed_with_their_reasons() -> None:
    run = synthetic_tune_run(refuses=lambda variant: "" if variant.is_default else "mlp: out of memory")
    skipped = tuple(
        Skipped(Variant((ModelChange("mlp", thread_count=count),)), "too many threads") for count in (8, 16)
    )

    page = Page(render(with_group(run, skipped=skipped)))

    assert "too many threads (2 configurations)" in page.text
    assert "mlp: out of memory" in page.text


def test_a_run_in_which_everything_failed_is_a_page_that_says_so() -> None:
    page = Page(render(synthetic_tune_run(refuses=lambda variant: "no such file")))

    assert "Nothing was measured" in page.text
    assert "no such file" in page.text
    assert "g0-latency" not in page.ids


def test_a_run_that_ended_early_says_so_at_the_top() -> None:
    interrupted = Page(render(with_group(replace(better_run(), is_interrupted=True), is_complete=False)))
    lost = Page(render(replace(better_run(), problem="the server ended")))
    nothing = Page(render(replace(better_run(), groups=())))

    assert "The run was interrupted." in interrupted.text
    assert "The search did not come to its end." in interrupted.text
    assert "The run ended early: the server ended." in lost.text
    assert "No model was tuned." in nothing.text


def test_several_models_have_their_own_parts_of_the_page() -> None:
    page = Page(render(synthetic_tune_run("a", "b")))

    assert {"g0-latency", "g1-latency", "g0-v0", "g1-v0"} <= page.ids
    assert [group["models"] for group in page.data["groups"]] == [["a"], ["b"]]


def test_a_page_of_named_variants_has_them_the_default_and_the_recommended_one() -> None:
    names = [variant.short_name for variant in group_of(better_run()).variants if not variant.variant.is_default]
    recommended = Page(render(better_run())).data["groups"][0]["variants"][0]["name"]

    shown = {v["name"] for v in Page(render(better_run(), names[:1])).data["groups"][0]["variants"]}

    assert shown == {names[0], "config_default", recommended}


def test_trials_without_their_full_measurement_have_no_breakdown_but_all_else() -> None:
    page = Page(render(synthetic_tune_run(has_levels=False)))

    assert page.data["groups"][0]["variants"][0]["loads"][0]["parts"] == [[]]


def test_models_tuned_together_show_their_rates_added_and_the_worst_latency() -> None:
    run = synthetic_tune_run("a", has_levels=False)
    both = _together(group_of(run))

    page = Page(render(replace(run, groups=(both,))))

    assert page.data["groups"][0]["models"] == ["a", "b"]
    best = both.decision.best
    assert best is not None
    rate = 2 * best.metrics["a"][Metric.THROUGHPUT].value
    assert value_text(Metric.THROUGHPUT, rate) in page.text
    assert "Loads of b" in page.text


def _together(group: GroupRecord) -> GroupRecord:
    """Return the group as if a second model had been measured along, with the same outcome."""

    def twice(measured: Measured | None) -> Measured | None:
        return measured and replace(measured, metrics={"a": measured.metrics["a"], "b": measured.metrics["a"]})

    def loads(trial: Any) -> Any:
        return replace(trial, loads=(*trial.loads, replace(trial.loads[0], model="b")))

    trials = tuple(
        replace(record, trial=loads(record.trial), measured=twice(record.measured)) for record in group.trials
    )

    def ranked(one: Any) -> Any:
        return one and replace(loads(one), metrics={"a": one.metrics["a"], "b": one.metrics["a"]})

    decision: Decision = replace(
        group.decision,
        best=ranked(group.decision.best),
        default=ranked(group.decision.default),
        ranking=tuple(map(ranked, group.decision.ranking)),
    )
    return replace(group, goal=Goal((ModelGoal("a"), ModelGoal("b"))), trials=trials, decision=decision)


def test_settings_are_told_in_words() -> None:
    change = ModelChange("m", 1, 8, 100, 2, fields=(("optimization", json.dumps({"priority": 1})),))

    assert settings_of(Variant((change,))) == (
        "1 instance, 2 threads each, batch 8, delay 100 us, optimization.priority 1"
    )
    assert settings_of(Variant((ModelChange("a", 2), ModelChange("b", 3)))) == "a: 2 instances; b: 3 instances"
    assert settings_of(Variant((ModelChange("a", 2), ModelChange("b")))) == "2 instances"


def test_goals_are_told_in_words() -> None:
    goal = ModelGoal(
        "m",
        (Objective(Metric.THROUGHPUT, 2), Objective(Metric.CPU_USED_RAM)),
        (Constraint(Metric.GPU_USED_MEMORY, maximum=2000), Constraint(Metric.GPU_UTILIZATION, minimum=50)),
    )

    assert goal_text(goal) == (
        "most throughput (weight 2), least memory (weight 1), "
        "GPU memory at most 2.00 GB, GPU utilisation at least 50.0 %"
    )


def test_requests_of_several_sizes_have_a_plot_that_comes_first_in_the_offline_preset() -> None:
    run = synthetic_tune_run(batch_sizes=(1, 4))

    online, offline = (render(replace(run, is_offline=value)).decode() for value in (False, True))

    assert online.index("g0-latency") < online.index("g0-sizes")
    assert offline.index("g0-sizes") < offline.index("g0-latency")
    assert "for batches of work (offline)" in Page(offline.encode()).text
    assert "offline" not in Page(online.encode()).text


def test_a_gain_between_different_loads_names_them_wherever_it_is_shown() -> None:
    group = group_of(better_run())
    best = group.decision.best
    assert best
    elsewhere = replace(best, base_loads=(replace(best.loads[0], value=3),))
    ranking = (elsewhere, *group.decision.ranking[1:])
    moved = replace(group, decision=replace(group.decision, best=elsewhere, ranking=ranking))

    text = Page(render(replace(better_run(), groups=(moved,)))).text.replace("\N{NO-BREAK SPACE}", " ")

    assert "/s at concurrency 3" in text  # below the recommended configuration's throughput
    assert "default at concurrency 3" in text  # in the table
