from bench.compare import ratios, summary
from bench.load import Point, wrk_percentile


def point(rate_per_s: float, p50_us: float) -> Point:
    return Point(rate_per_s, p50_us, p99_us=2 * p50_us, cpu_us=10)


def test_a_ratio_above_one_means_that_a_is_better_for_every_figure() -> None:
    pairs = [(point(200, 5), point(100, 10))]

    assert ratios(pairs, "rate_per_s") == [2]
    assert ratios(pairs, "p50_us") == [2]


def test_the_summary_is_the_median_of_the_ratios_of_pairs_not_the_ratio_of_medians() -> None:
    pairs = [(point(100, 1), point(100, 1)), (point(90, 1), point(30, 1)), (point(400, 1), point(200, 1))]

    row = summary(pairs)["rate_per_s"]

    assert (row["a"], row["b"]) == (100, 100)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (2, 1, 3)


def test_latencies_of_wrk_are_read_in_every_unit() -> None:
    report = "  Latency Distribution\n     50%  600.00us\n     90%    1.25ms\n     99%    1.50s\n"

    assert [wrk_percentile(report, percent) for percent in (50, 90, 99)] == [600, 1250, 1_500_000]
