"""Builds the command lines of measurements, and reads their results. Pure."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from charonia.config.pbtxt import parse
from charonia.core.errors import invalid
from charonia.platform.values import Amount, Number, RequestBody, Text

CSV_FILE = "measurements.csv"
REPORT_FILE = "report.html"
TUNE_FILE = "tune.json"

MINUTES_MAX = 240.0
CONCURRENCY_MAX = 1024
LEVELS_MAX = 32
BATCH_SIZE_MAX = 2**20
REQUESTS_MAX = 10**9
BUDGET_MS_MAX = 1e9
VARIANTS_MAX = 100
PROBLEM_CHARS_MAX = 500

_RANGE = re.compile(r"(\d{1,4})(?::(\d{1,4})(?::(\d{1,4}))?)?")
THREADS_PARAMETER = "intra_op_thread_count"

_LEVEL = re.compile(r"Request concurrency: (\d+)")
_PROGRESS = re.compile(r"; at most (?:(\d+) h )?(?:(\d+) min )?(?:(\d+) s )?left$")


class PerfJob(RequestBody):
    """A measurement of a model of a deployment."""

    model: Text
    concurrency: Text = Field(
        default="1:16:5", description="Requests in flight: a number, or START:END[:STEP], a level each."
    )
    protocol: Text = Field(default="http", description="`http` or `grpc`.")
    batch_size: Number = Field(default=1, description="Items of a request.")
    is_language_model: bool = Field(default=False, description="Whether times to tokens are measured.")
    requests: Number = Field(
        default=0, description="Requests of the only level, 0 for as many as precise figures need."
    )
    deployment: Text = ""

    def model_post_init(self, context: object, /) -> None:
        """Check the values that the types allow."""
        problems = []
        found = _RANGE.fullmatch(self.concurrency)
        if found is None:
            problems.append(f"concurrency: expected N or START:END[:STEP], got '{self.concurrency}'")
        else:
            start, end, step = _bounds(found)
            if not (1 <= start <= end <= CONCURRENCY_MAX and step):
                problems.append(f"concurrency: expected 1 to {CONCURRENCY_MAX}, ascending, got '{self.concurrency}'")
            elif self.level_count > LEVELS_MAX:
                problems.append(f"concurrency: expected at most {LEVELS_MAX} levels, got '{self.concurrency}'")
            elif self.requests and self.level_count > 1:
                problems.append(f"concurrency: expected a single level with requests, got '{self.concurrency}'")
        if self.protocol not in ("http", "grpc"):
            problems.append(f"protocol: expected http or grpc, got '{self.protocol}'")
        if not 1 <= self.batch_size <= BATCH_SIZE_MAX:
            problems.append(f"batch_size: expected 1 to {BATCH_SIZE_MAX}, got {self.batch_size}")
        if self.requests > REQUESTS_MAX:
            problems.append(f"requests: expected 0 to {REQUESTS_MAX}, got {self.requests}")
        if problems:
            raise invalid("\n".join(problems))

    @property
    def level_count(self) -> int:
        """How many levels are measured."""
        found = _RANGE.fullmatch(self.concurrency)
        assert found is not None
        start, end, step = _bounds(found)
        return (end - start) // step + 1

    def command(self, url: str, folder: str) -> list[str]:
        """Return the arguments of `charonia`; an API key belongs into its environment, as CHARONIA_API_KEY.

        Args:
            url: The endpoint of the protocol: "http://127.0.0.1:9000".
        """
        return [
            "perf", "-m", self.model, "-u", url.removeprefix("http://").removeprefix("grpc://"),
            "-i", self.protocol, "-b", str(self.batch_size),
            "--concurrency-range", self.concurrency, "--no-progress", "-v",
            *(("--request-count", str(self.requests)) if self.requests else ("--measurement-mode", "adaptive")),
            "--csv", f"{folder}/{CSV_FILE}", "--html", f"{folder}/{REPORT_FILE}",
            *(["--llm"] if self.is_language_model else []),
        ]  # fmt: skip


class TuneJob(RequestBody):
    """A search for the best configuration of a version of a model."""

    model: Text
    version: Number
    minutes: Amount = Field(default=5.0, description="Time limit.")
    latency_budget_ms: Amount = Field(default=0.0, description="Largest p99 latency in milliseconds, 0 for none.")
    environment: Text = Field(
        default="", description="Environment to serve it in, empty for the platform's own Python."
    )

    def model_post_init(self, context: object, /) -> None:
        """Check the values that the types allow."""
        problems = []
        if not 0 < self.minutes <= MINUTES_MAX:
            problems.append(f"minutes: expected at most {MINUTES_MAX:.0f}, got {self.minutes:g}")
        if self.latency_budget_ms > BUDGET_MS_MAX:
            problems.append(f"latency_budget_ms: expected 0 to {BUDGET_MS_MAX:g}, got {self.latency_budget_ms:g}")
        if problems:
            raise invalid("\n".join(problems))

    def command(self, repository: str, folder: str) -> list[str]:
        """Return the arguments of `charonia` for the model of a repository; results go to a folder."""
        return [
            "tune", "-m", repository, "--profile-models", self.model,
            "--time-budget", f"{self.minutes * 60:.0f}s", "-v",
            *(["--latency-budget", f"{self.latency_budget_ms:g}"] if self.latency_budget_ms else []),
            "-e", f"{folder}/tables", "-s", f"{folder}/checkpoints",
            "--output-model-repository-path", f"{folder}/variants", "--override-output-model-repository",
            "--json", f"{folder}/{TUNE_FILE}", "--html", f"{folder}/{REPORT_FILE}",
        ]  # fmt: skip


def _bounds(found: re.Match[str]) -> tuple[int, int, int]:
    start = int(found[1])
    return start, int(found[2] or start), int(found[3] or 1)


def level_begun(line: str) -> int | None:
    """Return the number of requests in flight of the level that a line starts, None for other lines."""
    found = _LEVEL.fullmatch(line.strip())
    return int(found[1]) if found is not None else None


def levels(text: str) -> list[dict[str, Any]]:
    """Return the levels of a measurement from its CSV: load, inferences a second, latencies in ms, verdict."""
    found = []
    for row in csv.DictReader(text.splitlines()):
        load = row.get("Concurrency") or row.get("Request Rate") or "0"
        level: dict[str, Any] = {"load": float(load), "throughput": float(row["Inferences/Second"])}
        level |= {p: float(row[f"{p} latency"]) / 1000 for p in ("p50", "p99") if row.get(f"{p} latency")}
        level |= {"verdict": row["Verdict"]} if row.get("Verdict") else {}
        found.append(level)
    return sorted(found, key=lambda level: level["load"])


def seconds_left(line: str) -> float | None:
    """Return the remaining time of a search at most, from a line of its output; None for other lines."""
    found = _PROGRESS.search(line)
    if found is None:
        return None
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def recommendation(text: str, model: str) -> dict[str, Any]:
    """Return the result of a search for a model, from its JSON.

    Returns:
        `conclusion`; `gain`, of throughput over the default as a factor; `sentences`; and, of the best configuration,
        `config`, the text of its config.pbtxt, and `change`, the members of the model in a deployment's specification
        that select it, empty for the current configuration. Without a best one, only the first and the sentences.
        `variants` has all that were tried, the one with most throughput first.
    """
    group = json.loads(text)["groups"][0]
    decision = group["decision"]
    found: dict[str, Any] = {"conclusion": decision["conclusion"], "sentences": decision.get("sentences", [])}
    best = decision.get("best")
    if variants := _variants(group, best, model):
        found["variants"] = variants
    record = best and next((each for each in group["variants"] if each["variant"] == best["variant"]), None)
    if not record:
        return found
    written = record["configs"][0]["text"]
    changes = [each for each in best["variant"]["changes"] if each["model"] == model]
    return {
        **found,
        "gain": best["gain"]["value"] if best.get("gain") else 0.0,
        "config": written,
        "change": _as_deployed(changes[0], parse(written).dynamic_batching is not None) if changes else {},
    }


def _variants(group: Mapping[str, Any], best: Mapping[str, Any] | None, model: str) -> list[dict[str, Any]]:
    """Return what was tried: title, load, means of its best load, `change` as in a recommendation, or the problem."""
    found = []
    for record in group["variants"]:
        trials = [each for each in group.get("trials", ()) if each["trial"]["variant"] == record["variant"]]
        if not trials:
            continue
        changes = [each for each in record["variant"]["changes"] if each["model"] == model]
        batches = bool(changes) and parse(record["configs"][0]["text"]).dynamic_batching is not None
        is_best = best is not None and best["variant"] == record["variant"]
        row: dict[str, Any] = {"title": _title(changes[0]) if changes else "default configuration", "is_best": is_best}
        by_load: dict[float, list[Mapping[str, Any]]] = {}
        for each in trials:
            if each["measured"]:
                load = next(one["value"] for one in each["trial"]["loads"] if one["model"] == model)
                by_load.setdefault(load, []).append(each["measured"]["metrics"][model])
        if by_load:
            rows = [
                {"load": load, "throughput": _mean(of, "perf_throughput"), "p99_ms": _mean(of, "perf_latency_p99")}
                for load, of in by_load.items()
            ]
            row |= max(rows, key=lambda each: each["throughput"] or 0.0)
            row["change"] = _as_deployed(changes[0], batches) if changes else {}
        else:
            row["problem"] = str(trials[0]["failed"]["reason"])[:PROBLEM_CHARS_MAX]
        found.append(row)
    return sorted(found, key=lambda each: -(each.get("throughput") or 0.0))[:VARIANTS_MAX]


def _mean(metrics: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [each[name]["value"] for each in metrics if name in each]
    return sum(values) / len(values) if values else None


def _title(change: Mapping[str, Any]) -> str:
    """Return the settings of a change in words."""
    count, size, threads = change["instance_count"], change["max_batch_size"], change["thread_count"]
    parts = [
        f"{count} instance{'s' * (count != 1)}" if count else "",
        f"batches up to {size}" if size else "",
        f"{change['queue_delay_us']} \N{MICRO SIGN}s for a batch" if change["queue_delay_us"] else "",
        f"{threads} thread{'s' * (threads != 1)}" if threads else "",
        *(name for name, _ in change["fields"]),
    ]
    return ", ".join(filter(None, parts)) or "default configuration"


def _as_deployed(change: Mapping[str, Any], batches: bool) -> dict[str, Any]:
    """Return a change of a variant as members of a model in a deployment's specification.

    Args:
        change: The change; None for unchanged values.
    """
    size, threads = change["max_batch_size"], change["thread_count"]
    batching = {"max_batch_size": size, "max_queue_delay_microseconds": change["queue_delay_us"]}
    config: dict[str, Any] = {name: json.loads(value) for name, value in change["fields"]}
    if batches and size is not None:
        config.setdefault("dynamic_batching", {})
    if threads is not None:
        config["parameters"] = {**config.get("parameters", {}), THREADS_PARAMETER: {"string_value": str(threads)}}
    found = {
        "instances": {"min": count} if (count := change["instance_count"]) else {},
        "batching": {name: value for name, value in batching.items() if value is not None},
        "config": config,
    }
    return {name: value for name, value in found.items() if value}
