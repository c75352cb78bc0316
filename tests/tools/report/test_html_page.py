from dataclasses import replace

import pytest
from tests.support.report_page import HOSTILE, Page, check_closed, check_hostile
from tests.support.runs import synthetic_run

from charonia.core.errors import ServingError
from charonia.core.latency import LatencyHistogram
from charonia.tools.report.html import render
from charonia.tools.results.records import (
    ErrorKind,
    Goodput,
    Gpu,
    LevelResult,
    LoadLevel,
    LoadMode,
    PerfRun,
    ServerModel,
    ServerSide,
    Verdict,
)

ONE = (LoadLevel(LoadMode.CONCURRENCY, 4),)


def with_level(run: PerfRun, **changes: object) -> PerfRun:
    level: LevelResult = replace(run.levels[0], **changes)  # type: ignore[arg-type]  # fields of the record
    return replace(run, levels=(level, *run.levels[1:]))


def hostile_run() -> PerfRun:
    run = synthetic_run(ONE, model=HOSTILE, options={HOSTILE: HOSTILE})
    inner = ServerModel(HOSTILE, HOSTILE, 9, 9, 9, 0, 900, 100, 100, 100, 100, 9)
    assert run.levels[0].server.model is not None
    run = with_level(
        run,
        reasons=(HOSTILE, HOSTILE),
        errors=(ErrorKind(HOSTILE, 1, (HOSTILE,)),),
        server=ServerSide(replace(run.levels[0].server.model, name=HOSTILE, composing=(inner,)), True, (HOSTILE,)),
        gpus=(Gpu(HOSTILE, 0.5, 100.0, 2**30, 2**33),),
        goodput=Goodput((HOSTILE,), 1, 1.0, 1.0),
    )
    return replace(
        run,
        tool=HOSTILE,
        began_at=HOSTILE,
        machine=replace(run.machine, host=HOSTILE, system=HOSTILE, processor=HOSTILE, python=HOSTILE),
        server=replace(run.server, url=HOSTILE, name=HOSTILE, version=HOSTILE, protocol=HOSTILE),
        model=replace(run.model, name=HOSTILE, version=HOSTILE, platform=HOSTILE),
        notes=(HOSTILE,),
        command=HOSTILE,
    )


def test_hostile_names_are_text_wherever_they_stand() -> None:
    hostile = Page(render([hostile_run()]))

    check_hostile(Page(render([synthetic_run(ONE)])), hostile)


def test_data_of_the_plots_cannot_end_its_script() -> None:
    page = Page(render([hostile_run(), hostile_run()]))

    assert "<" not in page.scripts[0]
    assert page.data["runs"][0]["levels"][0]["parts"][1]["model"] == HOSTILE


def test_lone_surrogates_in_names_do_not_stop_the_page() -> None:
    assert b"identity" not in render([synthetic_run(ONE, model="\udcff", options={})])[:2000]


def test_the_page_loads_nothing_and_runs_only_its_own_script() -> None:
    page = check_closed(render([synthetic_run()]))

    assert not any("href" in attributes for _, attributes in page.elements)


def test_the_best_level_and_its_figures_come_first() -> None:
    page = Page(render([synthetic_run()]))

    headline = "The best of 4 levels is concurrency 8: 6,203 inferences/s, half of the requests within 1."
    assert headline in page.text
    assert page.text.index(headline) < page.text.index("p99.9") < page.text.index("Environment")
    assert [level["best"] for level in page.data["runs"][0]["levels"]] == [False, False, False, True]


def test_a_level_that_may_be_the_best_by_chance_is_not_called_the_best() -> None:
    run = synthetic_run()
    last = run.levels[-1]
    wide = replace(last.throughput, low=0.4 * last.throughput.value, high=1.6 * last.throughput.value)

    page = Page(render([replace(run, levels=(*run.levels[:-1], replace(last, throughput=wide)))]))

    assert [level["best"] for level in page.data["runs"][0]["levels"]] == [False, False, True, False]
    assert "The best of" not in page.text
    assert "2 of 4 levels are equally fast within their spread. At concurrency 4: " in page.text


def test_throughput_and_latency_have_a_plot_by_load() -> None:
    page = Page(render([synthetic_run()]))

    assert "Throughput and latency by load" in page.text
    assert [level["load"] for level in page.data["runs"][0]["levels"]] == [1, 2, 4, 8]


def test_levels_not_to_be_trusted_are_explained_once_for_all() -> None:
    run = synthetic_run()
    reasons = ("The windows differed.",)
    levels = [replace(level, verdict=Verdict.UNSTABLE, reasons=reasons) for level in run.levels[:3]]

    page = Page(render([replace(run, levels=(*levels, replace(run.levels[3], reasons=("They agreed.",))))]))

    assert "concurrency 1, 2 and 4 unstable The windows differed." in page.text
    assert "They agreed." not in page.text


def test_the_command_and_every_option_are_at_the_end() -> None:
    page = Page(render([synthetic_run(ONE, options={"measurement-interval": "1234"})]))

    assert "charonia perf -m identity --concurrency-range 1:8" in page.text
    assert page.text.index("measurement-interval") > page.text.index("Environment")


def test_errors_are_listed_with_their_messages() -> None:
    page = Page(render([synthetic_run(ONE, error_share=0.1)]))

    assert "UNAVAILABLE" in page.text
    assert "queue of model is full" in page.text


def test_an_open_loop_shows_service_times_beside_response_times() -> None:
    closed, opened = (
        Page(render([synthetic_run((LoadLevel(mode, 100),))])) for mode in (LoadMode.CONCURRENCY, LoadMode.REQUEST_RATE)
    )

    assert closed.data["runs"][0]["levels"][0]["curve"]["service"] is None
    curve = opened.data["runs"][0]["levels"][0]["curve"]
    assert curve["service"][-1] <= curve["response"][-1]
    assert "Sent late" in opened.text
    assert "Sent late" not in closed.text


def test_a_run_without_any_answer_is_a_page_that_says_so() -> None:
    nothing = LatencyHistogram()
    run = with_level(
        synthetic_run(ONE),
        verdict=Verdict.NO_REQUESTS,
        request_count=0,
        response_times=nothing,
        service_times=nothing,
        timeline=(),
        windows=(),
        server=ServerSide(None, other_traffic=False),
        resources=None,
    )

    page = Page(render([run]))

    assert "No request was answered." in page.text
    assert "no answers" in page.text
    assert page.data["runs"][0]["levels"] == []


def test_a_run_over_the_limit_everywhere_has_no_best_level() -> None:
    run = with_level(synthetic_run(ONE), over_latency_limit=True)

    assert "No level stayed within the latency limit." in Page(render([run])).text


def test_several_runs_stand_beside_each_other_under_names_of_their_own() -> None:
    page = Page(render([synthetic_run(seed=1), synthetic_run(seed=2), synthetic_run(model="other")]))

    assert [run["name"] for run in page.data["runs"]] == [
        "identity on charonia (1)",
        "identity on charonia (2)",
        "other on charonia",
    ]


def test_parts_of_a_request_add_up_to_its_time_at_the_client() -> None:
    run = synthetic_run(ONE)
    level = Page(render([run])).data["runs"][0]["levels"][0]

    parts = level["parts"][0]
    assert sum(value for name, value in parts.items() if name != "model") == pytest.approx(
        run.levels[0].service_times.mean, rel=1e-6
    )


def test_the_distribution_ends_at_the_slowest_request_and_never_falls() -> None:
    run = synthetic_run(ONE)
    curve = Page(render([run])).data["runs"][0]["levels"][0]["curve"]

    assert curve["response"][0] == run.levels[0].response_times.minimum
    assert curve["response"][-1] == run.levels[0].response_times.maximum
    assert curve["response"] == sorted(curve["response"])
    assert curve["x"] == sorted(curve["x"])


def test_levels_follow_each_other_on_the_time_line_by_the_clock_where_it_is_known() -> None:
    run = synthetic_run((LoadLevel(LoadMode.CONCURRENCY, 1), LoadLevel(LoadMode.CONCURRENCY, 2)), duration_s=1.0)
    clocked = replace(
        run,
        levels=tuple(replace(level, epoch_ns=10**18 + 5 * 10**9 * place) for place, level in enumerate(run.levels)),
    )

    begins = [
        [level["time"]["begin"][0] for level in Page(render([shown])).data["runs"][0]["levels"]]
        for shown in (run, clocked)
    ]

    assert begins == [[0, 1000], [0, 5000]]


def test_no_run_is_no_page() -> None:
    with pytest.raises(ServingError, match="expected at least one run"):
        render([])
