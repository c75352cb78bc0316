"""Compare `charonia perf --llm` with aiperf on the same server: both send the same prompts, in alternating order.

python -m bench.aiperf_agreement --url http://127.0.0.1:9000 --model NAME --tokenizer FOLDER --aiperf VENV/bin/aiperf

Prints each figure of both tools, and the ratio of their medians over the rounds. aiperf stays offline: its tokenizer is
laid out as in the cache of Hugging Face.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.compare import RESULTS
from bench.machine import machine
from charonia.tools.perf.language.load import FileTokenizer
from charonia.tools.perf.language.requests import TextGenerator
from charonia.tools.results.language import FIGURES

RUN_TIMEOUT_S = 900.0
REVISION = "0" * 40
TOKENIZER = "local/measured"
STATISTICS = {"mean": "avg", "p50": "p50", "p90": "p90", "p99": "p99"}
"""Statistics of a figure, as aiperf names them by our name."""

TAGS = {
    "first_token": "time_to_first_token",
    "second_token": "time_to_second_token",
    "inter_token": "inter_token_latency",
    "inter_chunk": "inter_chunk_latency",
    "latency": "request_latency",
    "user_rate": "output_token_throughput_per_user",
    "input_tokens": "input_sequence_length",
    "output_tokens": "output_sequence_length",
}
"""Figures of each request, as aiperf names them."""

Values = dict[str, float]
"""Values by figure and statistic, `first_token p50`; times in ms."""


def prompts(path: Path, given: argparse.Namespace) -> None:
    """Write the prompts that both tools read."""
    generator = TextGenerator(FileTokenizer(given.tokenizer), given.seed)
    lengths = random.Random(given.seed)
    with path.open("w", encoding="utf-8") as lines:
        for number in range(given.requests):
            tokens = max(1, round(lengths.gauss(given.input_tokens, given.input_tokens_stddev)))
            line = {"text_input": generator.text(tokens, number), "output_length": given.output_tokens}
            lines.write(json.dumps(line) + "\n")


def run_charonia(given: argparse.Namespace, file: Path, folder: Path) -> Values:
    """Run `charonia perf --llm` once."""
    result = folder / "charonia.json"
    result.unlink(missing_ok=True)
    ignore = ["--ignore-eos"] if given.ignore_eos else []
    command = [
        *(sys.executable, "-m", "charonia", "perf", "--llm", "-m", given.model, "-u", given.url),
        *("--tokenizer", given.tokenizer, "--prompts", str(file), "--concurrency-range", str(given.concurrency)),
        *("--request-count", str(given.requests), "--json", str(result), "--quiet", *ignore),
    ]
    subprocess.run(command, check=False, timeout=RUN_TIMEOUT_S)
    level = json.loads(result.read_text())["levels"][0]
    figures = level["language"]
    values = {
        "output tokens/s": figures["output_rate"],
        "requests/s": figures["request_rate"],
        "requests": float(level["request_count"]),
    }
    for name in TAGS:
        for field in STATISTICS if figures[name] is not None else ():
            values[f"{name} {field}"] = figures[name][field] * FIGURES[name].factor
    return values


def run_aiperf(given: argparse.Namespace, file: Path, folder: Path) -> Values:
    """Run `aiperf profile` once."""
    artifacts = folder / "aiperf"
    shutil.rmtree(artifacts, ignore_errors=True)
    extra = ["ignore_eos:true"] if given.ignore_eos else []
    command = [
        *(
            given.aiperf,
            "profile",
            "--model",
            given.model,
            "--url",
            given.url,
            "--endpoint-type",
            "chat",
            "--streaming",
        ),
        *("--tokenizer", TOKENIZER, "--input-file", str(file), "--custom-dataset-type", "mooncake_trace"),
        *("--concurrency", str(given.concurrency), "--request-count", str(given.requests), "--ui", "none"),
        *("--artifact-dir", str(artifacts), "--use-legacy-max-tokens"),
        *(("--extra-inputs", *extra) if extra else ()),
    ]
    environment = {**os.environ, "HF_HOME": str(hub(folder, Path(given.tokenizer))), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, check=False, timeout=RUN_TIMEOUT_S, env=environment, capture_output=True, text=True, cwd=folder
    )
    found = list(artifacts.glob("**/profile_export_aiperf.json"))
    if not found:
        raise SystemExit(f"aiperf wrote no result:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    report = json.loads(found[0].read_text())
    values = {
        "output tokens/s": report["output_token_throughput"]["avg"],
        "requests/s": report["request_throughput"]["avg"],
        "requests": report["request_count"]["avg"],
    }
    for name, tag in TAGS.items():
        for field, theirs in STATISTICS.items() if tag in report else ():
            values[f"{name} {field}"] = report[tag][theirs]
    return values


def hub(folder: Path, tokenizer: Path) -> Path:
    """Return a home of Hugging Face's cache with the tokenizer."""
    model = folder / "hub" / "models--local--measured"
    snapshot = model / "snapshots" / REVISION
    if not snapshot.exists():
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(REVISION)
        for file in tokenizer.glob("*.json"):
            shutil.copy(file, snapshot)
    return folder


def compared(ours: list[Values], theirs: list[Values]) -> list[dict[str, Any]]:
    """Return the medians of each figure, and their ratio."""
    rows = []
    for name in ours[0]:
        if not all(name in values for values in theirs):
            continue
        mine, other = median(values[name] for values in ours), median(values[name] for values in theirs)
        rows.append({"figure": name, "charonia": mine, "aiperf": other, "ratio": mine / other if other else None})
    return rows


def main() -> None:
    """Run both tools, print the comparison, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="server of OpenAI's API, without /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json and its configuration")
    parser.add_argument("--aiperf", required=True, help="the program")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-tokens", type=int, default=200)
    parser.add_argument("--input-tokens-stddev", type=int, default=0)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="", help="write results/NAME.json")
    given = parser.parse_args()
    ours: list[Values] = []
    theirs: list[Values] = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        file = folder / "prompts.jsonl"
        prompts(file, given)
        for number in range(given.rounds):
            turns = [(run_charonia, ours), (run_aiperf, theirs)]
            for run, found in turns if number % 2 == 0 else reversed(turns):
                found.append(run(given, file, folder))
    rows = compared(ours, theirs)
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        print(f"{row['figure']:22} charonia {row['charonia']:12.4g}  aiperf {row['aiperf']:12.4g}  ratio {ratio}")
    if given.name:
        document = {
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "options": {
                name: value for name, value in vars(given).items() if name not in ("url", "tokenizer", "aiperf")
            },
            "machine": machine(),
            "rows": rows,
            "rounds": {"charonia": ours, "aiperf": theirs},
        }
        (RESULTS / f"{given.name}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
