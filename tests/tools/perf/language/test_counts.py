"""The definitions of the figures of language models, on times of our own."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.tools.perf.language.plan import LanguageEndpoint, LanguagePlan, PromptPlan
from charonia.tools.perf.language.replies import (
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    UNKNOWN,
    CountedResponse,
    Reply,
    ReplyReader,
    figures,
    fill,
    is_good,
    problem,
    values_of,
    widened,
)
from charonia.tools.perf.language.requests import Conversation, LanguageSource, Turn
from charonia.tools.perf.samples import DONE, INTENDED, OUTCOME, RESPONSES, SENT, WIDTH, ReceivedResponse, Rows
from charonia.tools.results.language import TokenCounter

START = 1_000
MS = 1_000_000


def reader() -> ReplyReader:
    source = LanguageSource(("m", ""), LanguagePlan(), PromptPlan(), [Conversation((Turn("hi"),))])
    return ReplyReader(source, LanguageEndpoint.CHAT, None, is_grpc=False)


def replied(times: list[int], *, stream: bool = True, error: str = "") -> Reply:
    return Reply(np.array(times, np.int64), stream, "text", "", error=error)


def row_of(reply: Reply, output_tokens: int, input_tokens: int = 5) -> tuple[Rows, list[int]]:
    row = np.zeros((1, WIDTH), np.int64)
    row[0, INTENDED] = row[0, SENT] = START
    rows = widened(row)
    gaps = fill(rows[0], CountedResponse(reply, input_tokens, output_tokens))
    return rows, gaps.tolist()


@given(
    gaps=st.lists(st.integers(1, 10**9), min_size=2, max_size=50),
    tokens_a_piece=st.integers(1, 4),
)
def test_the_definitions_are_those_of_aiperf(gaps: list[int], tokens_a_piece: int) -> None:
    times = (START + np.cumsum(gaps)).tolist()
    tokens = tokens_a_piece * len(times)

    rows, chunk_gaps = row_of(replied(times), tokens)
    values = {name: found[0] for name, found in values_of(rows).items()}

    first, latency = times[0] - START, times[-1] - START
    assert values["first_token"] == first
    assert values["second_token"] == times[1] - times[0]
    assert values["latency"] == latency
    assert values["inter_token"] == pytest.approx((latency - first) / (tokens - 1))
    assert values["user_rate"] == pytest.approx(1e9 * (tokens - 1) / (latency - first))
    assert values["output_tokens"] == tokens
    assert chunk_gaps == gaps[1:]
    assert sum(chunk_gaps) == latency - first


def test_one_token_has_no_inter_token_latency() -> None:
    rows, gaps = row_of(replied([START + 5]), 1)
    values = values_of(rows)

    assert np.isnan(values["inter_token"][0])
    assert np.isnan(values["second_token"][0])
    assert values["first_token"][0] == 5
    assert gaps == []


def test_a_whole_response_has_a_latency_only() -> None:
    rows, gaps = row_of(replied([START + 5], stream=False), 20)
    values = values_of(rows)

    assert values["latency"][0] == 5
    assert all(np.isnan(values[name][0]) for name in ("first_token", "second_token", "inter_token", "user_rate"))
    assert gaps == []


def test_tokens_that_nobody_counted_are_left_out() -> None:
    rows, _ = row_of(replied([START + 5, START + 9]), UNKNOWN, UNKNOWN)

    found = figures(rows, [], 1_000_000_000, reader())

    assert (found.input_tokens, found.output_tokens, found.output_rate) == (None, None, 0.0)
    assert found.first_token is not None


def test_rates_are_of_all_tokens_in_the_time() -> None:
    rows = np.concatenate([row_of(replied([START + MS, START + 2 * MS]), tokens)[0] for tokens in (10, 30)])

    found = figures(rows, [], 2_000_000_000, reader())

    assert (found.output_rate, found.input_rate, found.request_rate) == (20.0, 5.0, 1.0)
    assert found.output_tokens is not None
    assert (found.output_tokens.minimum, found.output_tokens.maximum, found.output_tokens.count) == (10, 30, 2)


def test_percentiles_are_interpolated_and_the_deviation_is_that_of_a_sample() -> None:
    times = [[START + at * MS] for at in (1, 2, 3, 4)]
    rows = np.concatenate([row_of(replied(each), 1)[0] for each in times])

    first = figures(rows, [], 1, reader()).first_token

    assert first is not None
    assert (first.mean / MS, first.p50 / MS, first.minimum / MS, first.maximum / MS) == (2.5, 2.5, 1, 4)
    assert first.deviation / MS == pytest.approx(np.std([1, 2, 3, 4], ddof=1))
    assert first.p90 / MS == pytest.approx(np.percentile([1, 2, 3, 4], 90))


def test_a_good_request_meets_all_limits() -> None:
    fast, _ = row_of(replied([START + 10 * MS, START + 20 * MS]), 2)
    slow, _ = row_of(replied([START + 10 * MS, START + 90 * MS]), 2)
    whole, _ = row_of(replied([START + 10 * MS], stream=False), 2)
    failed = fast.copy()
    failed[0, OUTCOME] = 1
    rows = np.concatenate([fast, slow, whole, failed])

    assert is_good(rows, [("first_token", 10 * MS), ("inter_token", 10 * MS)]).tolist() == [True, False, False, False]
    assert is_good(rows, [("user_rate", 100.0)]).tolist() == [True, False, False, False]
    assert is_good(rows, [("latency", 20 * MS)]).tolist() == [True, False, True, False]


def test_without_usage_and_tokenizer_each_piece_is_a_token() -> None:
    counting = reader()
    body = b'data: {"choices": [{"delta": {"content": "a b"}}]}\n\n' * 3
    found = counting.read(0, ReceivedResponse(np.array([[9, len(body)]], np.int64).tobytes(), body))

    assert (found.output_tokens, found.input_tokens) == (3, UNKNOWN)
    assert (counting.output_counted_by, counting.input_counted_by) == (TokenCounter.PIECES, TokenCounter.NOBODY)


def test_a_response_without_content_or_with_an_error_is_a_failure() -> None:
    assert problem(replied([]))[0] == "EMPTY"
    assert problem(replied([5], error="gone")) == ("STREAM_ERROR", "gone")
    assert problem(replied([5])) == ("", "")


def test_rows_of_failures_keep_their_columns() -> None:
    row = np.arange(2 * WIDTH, dtype=np.int64).reshape(2, WIDTH)

    wide = widened(row)

    assert wide[:, :WIDTH].tolist() == row.tolist()
    assert wide[:, INPUT_TOKENS].tolist() == wide[:, OUTPUT_TOKENS].tolist() == [UNKNOWN, UNKNOWN]
    assert (wide[0, DONE], wide[0, RESPONSES]) == (row[0, DONE], row[0, RESPONSES])


class Words:
    def counts(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def words(self) -> list[str]:
        return []


def test_a_tokenizer_counts_the_prompt_with_what_was_said_before() -> None:
    turns = (Turn("one two"), Turn("three"))
    source = LanguageSource(("m", ""), LanguagePlan(), PromptPlan(), [Conversation(turns)])
    counting = ReplyReader(source, LanguageEndpoint.CHAT, Words(), is_grpc=False)
    body = b'data: {"choices": [{"delta": {"reasoning": "hm", "content": "a b"}}]}\n\n'
    arrivals = np.array([[9, len(body)]], np.int64).tobytes()
    second = 1

    first = [counting.read(0, ReceivedResponse(arrivals, body)).input_tokens for _ in range(2)]
    later = [counting.read(second, ReceivedResponse(arrivals, body, (reply,))).input_tokens for reply in ("x", "x y z")]

    assert first == [2, 2]
    assert later == [4, 6]
    assert counting.read(0, ReceivedResponse(arrivals, body)).output_tokens == 3
    assert (counting.output_counted_by, counting.input_counted_by) == (TokenCounter.TOKENIZER, TokenCounter.TOKENIZER)


def test_two_tokens_have_an_inter_token_latency() -> None:
    rows, _ = row_of(replied([START + 5, START + 12]), 2, 0)
    values = values_of(rows)

    assert values["inter_token"][0] == 7
    assert values["input_tokens"][0] == 0
