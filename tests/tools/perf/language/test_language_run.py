"""Whole runs against a server of OpenAI's API with responses of known times."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.language_server import FakeLanguageModel, language_server

from charonia.cli.perf import parse, run
from charonia.tools.results.json_form import from_json
from charonia.tools.results.language import TokenCounter
from charonia.tools.results.records import LevelResult, PerfRun, Verdict

MS = 1_000_000


def measured(url: str, tmp_path: Path, *arguments: str, model: str = "m") -> tuple[PerfRun, int]:
    result = tmp_path / "run.json"
    status = run(["-m", model, "--llm", "-u", url, "--quiet", "--json", str(result), *arguments])
    return from_json(result.read_bytes()), status


def level(run: PerfRun) -> LevelResult:
    assert len(run.levels) == 1
    return run.levels[0]


def test_times_and_tokens_of_a_stream_are_measured(tmp_path: Path) -> None:
    model = FakeLanguageModel(first_s=0.03, gap_s=0.01)
    with language_server(model) as url:
        made, status = measured(
            url, tmp_path, "--concurrency-range", "2", "--request-count", "6", "--output-tokens", "5",
            *("--goodput", "ttft:20s itl:1ms", "--input-tokens", "12"),
        )  # fmt: skip

    result = level(made)
    figures = result.language
    assert (status, result.verdict, result.request_count) == (0, Verdict.COMPLETE, 6)
    assert figures is not None
    assert figures.first_token is not None
    assert figures.inter_token is not None
    assert figures.inter_chunk is not None
    assert figures.latency is not None
    # Another program may hold a response up, but none makes it faster.
    assert 30 <= figures.first_token.p50 / MS < 200
    assert 70 <= figures.latency.p50 / MS < 600
    assert figures.inter_token.p50 > 5 * MS
    assert figures.inter_chunk.count == 6 * 4
    assert (figures.output_counted_by, figures.input_counted_by) == (TokenCounter.SERVER, TokenCounter.SERVER)
    assert figures.output_tokens is not None
    assert figures.input_tokens is not None
    assert (figures.output_tokens.mean, figures.input_tokens.mean) == (5, 12)
    assert result.goodput is not None
    assert (result.goodput.objectives, result.goodput.good_count) == (("ttft:20000ms", "itl:1ms"), 0)
    assert {body["max_tokens"] for _, body in model.bodies} == {5}


def test_a_session_repeats_the_replies_and_waits(tmp_path: Path) -> None:
    model = FakeLanguageModel(tokens=2)
    prompts = tmp_path / "sessions.jsonl"
    prompts.write_text(json.dumps({"turns": [{"text": "a"}, {"text": "b", "delay": 50}, {"text": "c"}]}) + "\n")
    with language_server(model) as url:
        made, status = measured(url, tmp_path, "--prompts", str(prompts), "--request-count", "3")

    said = [[message["content"] for message in body["messages"]] for _, body in model.bodies]
    assert status == 0
    assert said == [["a"], ["a", " word word", "b"], ["a", " word word", "b", " word word", "c"]]
    assert level(made).duration_ns >= 50 * MS


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    model = FakeLanguageModel(tokens=2)
    prompts = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"timestamp": 1000, "input_length": 5, "output_length": 3},
        {"timestamp": 1150, "session_id": "a", "text": "x"},
        {"session_id": "a", "text": "y"},
        {"timestamp": 1300, "input_length": 7, "output_length": 1},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with language_server(model) as url:
        made, status = measured(url, tmp_path, "--prompts", str(prompts), "--fixed-schedule")

    result = level(made)
    assert (status, result.verdict, result.request_count) == (0, Verdict.COMPLETE, 4)
    assert result.duration_ns >= 300 * MS
    assert [body.get("max_tokens") for _, body in model.bodies] == [3, None, None, 1]


def test_whole_responses_have_a_latency_and_tokens(tmp_path: Path) -> None:
    with language_server(FakeLanguageModel(tokens=4)) as url:
        made, _ = measured(url, tmp_path, "--no-stream", "--endpoint", "chat", "--request-count", "3")

    figures = level(made).language
    assert figures is not None
    assert figures.first_token is None
    assert figures.output_tokens is not None
    assert figures.output_tokens.mean == 4


def test_completions_and_embeddings_are_measured(tmp_path: Path) -> None:
    model = FakeLanguageModel(tokens=3)
    with language_server(model) as url:
        completions, _ = measured(f"{url}/v1", tmp_path, "--endpoint", "v1/completions", "--request-count", "2")
        embeddings, _ = measured(url, tmp_path, "--endpoint", "embeddings", "--request-count", "2")

    first, second = level(completions).language, level(embeddings).language
    assert first is not None
    assert first.output_tokens is not None
    assert first.output_tokens.mean == 3
    assert second is not None
    assert (second.output_tokens, second.first_token) == (None, None)
    assert second.input_tokens is not None
    assert [path for path, _ in model.bodies] == ["/v1/completions"] * 2 + ["/v1/embeddings"] * 2


def test_without_usage_pieces_are_counted_and_the_report_says_so(tmp_path: Path) -> None:
    with language_server(FakeLanguageModel(tokens=3, counts=False)) as url:
        made, _ = measured(url, tmp_path, "--request-count", "2")

    figures = level(made).language
    assert figures is not None
    assert (figures.output_counted_by, figures.input_counted_by) == (TokenCounter.PIECES, TokenCounter.NOBODY)
    assert figures.output_tokens is not None
    assert figures.output_tokens.mean == 3


def test_an_error_within_a_stream_is_a_failed_request(tmp_path: Path) -> None:
    with language_server(FakeLanguageModel(fails_after=2)) as url:
        made, status = measured(url, tmp_path, "--request-count", "2")

    (error,) = level(made).errors
    assert (error.kind, error.count, error.samples) == ("STREAM_ERROR", 2, ("the engine has stopped",))
    assert status == 3


def test_a_model_that_the_server_does_not_have_is_an_error_in_its_words(tmp_path: Path) -> None:
    with language_server(FakeLanguageModel()) as url:
        made, status = measured(url, tmp_path, "--request-count", "2", model="unknown")

    (error,) = level(made).errors
    assert (error.kind, error.samples) == ("NOT_FOUND", ("the model 'unknown' does not exist",))
    assert status == 3


def test_every_request_can_be_exported(tmp_path: Path) -> None:
    export = tmp_path / "requests.json"
    with language_server(FakeLanguageModel(tokens=3)) as url:
        measured(url, tmp_path, "--request-count", "2", "--profile-export-file", str(export), "--input-tokens", "4")

    requests = json.loads(export.read_text())["experiments"][0]["requests"]
    assert [len(request["response_timestamps"]) for request in requests] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer", "."], "expected --llm with it"),
        (["--turns", "3"], "expected --llm with it"),
        (["--goodput", "ttft:5ms"], "--goodput of tokens: expected --llm with it"),
        (["--fail-if", "ttft.p99 > 5ms"], "expected --llm with it"),
        (["--llm", "-b", "2"], "-b: expected 1 with --llm"),
        (["--llm", "-i", "grpc"], "expected infer with -i grpc"),
        (["--llm", "--fixed-schedule"], "expected --prompts with it"),
        (["--llm", "--input-data", "zero"], "expected --prompts in its place"),
        (["--llm", "--goodput", "tokens:5"], "expected latency:TIME"),
        (["--llm", "--endpoint", "speech"], "expected one of chat, completions"),
        (["--llm", "--prefixes", "5"], "expected COUNT:TOKENS"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: list[str], message: str) -> None:
    from charonia.core.errors import ServingError

    with pytest.raises(ServingError, match=message):
        parse(["-m", "m", *arguments])


def test_the_kind_of_service_of_perf_analyzer_is_understood() -> None:
    options = parse(["-m", "m", "--service-kind", "openai", "--endpoint", "v1/chat/completions"]).options

    assert options.is_language
    assert options.language.endpoint.value == "chat"
