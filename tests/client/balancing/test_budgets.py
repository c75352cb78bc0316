from charonia.client.balancing.budgets import MODELS_MAX, SAMPLES_MAX, SAMPLES_MIN, TOKENS_MAX, Latencies, RetryBudget


def test_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget(0.2)
    while budget.spend():
        pass
    for _ in range(100):
        budget.deposit()

    assert sum(budget.spend() for _ in range(100)) in (19, 20)


def test_a_client_saves_up_a_limited_number_of_retries() -> None:
    budget = RetryBudget(1.0)
    for _ in range(10_000):
        budget.deposit()

    assert sum(budget.spend() for _ in range(10_000)) == TOKENS_MAX


def test_a_ratio_of_zero_is_no_retry() -> None:
    budget = RetryBudget(0.0)
    budget.deposit()

    assert not budget.spend()


def test_the_percentile_of_a_model_is_known_after_some_requests_and_follows_the_recent_ones() -> None:
    latencies = Latencies()
    for value in range(1, SAMPLES_MIN):
        latencies.add("m", value)
    assert latencies.p95_ns("m") is None

    latencies.add("m", SAMPLES_MIN)
    assert latencies.p95_ns("m") == 20
    assert latencies.p95_ns("other") is None

    for _ in range(2 * SAMPLES_MAX):
        latencies.add("m", 1000)
    assert latencies.p95_ns("m") == 1000


def test_the_number_of_models_is_limited() -> None:
    latencies = Latencies()
    for _ in range(SAMPLES_MIN):
        latencies.add("first", 1)
    for number in range(MODELS_MAX):
        latencies.add(f"m{number}", 1)

    assert latencies.p95_ns("first") is None
