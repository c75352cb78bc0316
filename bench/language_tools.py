r"""`charonia perf --llm` beside other tools, on a server of exact times: prompts, sessions of turns, and a trace.

python -m bench.language_tools --tokenizer FOLDER --aiperf ENVIRONMENT/bin/aiperf \
    --guidellm ENVIRONMENT/bin/guidellm --vllm ENVIRONMENT/bin/python

The server sends the first token of a stream after 300 ms and one each 20 ms, 32 in all. Each tool runs each load that
it has, in turn; medians of the times, and requests/s.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.aiperf_agreement import RUN_TIMEOUT_S, TOKENIZER, hub
from bench.compare import RESULTS
from bench.machine import machine
from bench.servers import HOST
from charonia.tools.results.language import FIGURES

FIRST_S, BETWEEN_S, TOKENS = 0.3, 0.02, 32
STREAMS, REQUESTS, SESSIONS, TURNS, DELAY_MS, SPACING_MS = 4, 40, 12, 3, 200, 150
MODEL = "exact"
LOADS = ("prompts", "sessions", "trace")
Times = tuple[float, float, float]
"""Time to the first token and between tokens in ms, requests/s."""


class Exact:
    """The server, in a thread."""

    def __init__(self) -> None:
        self.port = 0
        self._is_open = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._is_open.wait()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_open.set()
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length:")[2].partition("\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                if not head.startswith("post"):
                    is_known = head.startswith(("get /v1/models ", "get /health "))
                    text = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
                    writer.write(b"HTTP/1.1 %b\r\n" % (b"200 OK" if is_known else b"404 Not Found"))
                    writer.write(b"Content-Type: application/json\r\n")
                    writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
                    continue
                await self._stream(writer, json.loads(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        words = sum(len(str(message["content"]).split()) for message in asked["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": TOKENS, "total_tokens": words + TOKENS}
        base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        for number in range(TOKENS + 1):
            choice = {"index": 0, "delta": {"content": " moon"}, "finish_reason": None}
            if number == TOKENS:
                choice |= {"delta": {}, "finish_reason": "length"}
            else:
                await asyncio.sleep(start + FIRST_S + number * BETWEEN_S - loop.time())
            self._chunk(writer, json.dumps({**base, "choices": [choice]}))
        if (asked.get("stream_options") or {}).get("include_usage"):
            self._chunk(writer, json.dumps({**base, "choices": [], "usage": usage}))
        self._chunk(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
        event = f"data: {text}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))


def write_loads(folder: Path) -> None:
    """Write the files that the tools read."""
    texts = [f"{number}. Tell me a story about the sea and its tides." for number in range(REQUESTS)]
    turns: list[dict[str, Any]] = [
        {"turns": [{"text": t, "delay": DELAY_MS if n else 0} for n, t in enumerate(texts[:TURNS])]}
    ] * SESSIONS
    lines: dict[str, list[dict[str, Any]]] = {
        "prompts": [{"text_input": text, "output_length": TOKENS} for text in texts],
        "vllm": [{"prompt": text} for text in texts],
        "sessions": turns,
        "trace": [
            {"timestamp": number * SPACING_MS, "text_input": text, "output_length": TOKENS}
            for number, text in enumerate(texts)
        ],
    }
    for name, each in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))


def charonia(given: argparse.Namespace, load: str, url: str, folder: Path) -> Times:
    """Run `charonia perf --llm`."""
    result = folder / "charonia.json"
    count = {"prompts": REQUESTS, "sessions": SESSIONS * TURNS, "trace": REQUESTS}[load]
    how = ["--fixed-schedule"] if load == "trace" else ["--concurrency-range", str(STREAMS)]
    how += [] if load == "trace" else ["--request-count", str(count)]
    command = [
        sys.executable,
        "-m",
        "charonia",
        "perf",
        "--llm",
        "-m",
        MODEL,
        "-u",
        url,
        "--tokenizer",
        given.tokenizer,
    ]
    command += ["--prompts", str(folder / f"{load}.jsonl"), *how, "--json", str(result), "--quiet"]
    subprocess.run(command, check=False, timeout=RUN_TIMEOUT_S)
    found = json.loads(result.read_text())["levels"][0]["language"]
    first, between = (found[name]["p50"] * FIGURES[name].factor for name in ("first_token", "inter_token"))
    return first, between, found["request_rate"]


def aiperf(given: argparse.Namespace, load: str, url: str, folder: Path) -> Times:
    """Run AIPerf."""
    artifacts = folder / f"aiperf-{load}-{datetime.now(UTC).timestamp()}"
    how = {
        "prompts": ["mooncake_trace", "--concurrency", str(STREAMS), "--request-count", str(REQUESTS)],
        "sessions": ["multi_turn", "--concurrency", str(STREAMS), "--num-sessions", str(SESSIONS)],
        "trace": ["mooncake_trace", "--fixed-schedule"],
    }[load]
    command = [given.aiperf, "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", TOKENIZER, "--ui", "none", "--artifact-dir", str(artifacts)]
    command += ["--input-file", str(folder / f"{load}.jsonl"), "--custom-dataset-type", *how]
    environment = {**os.environ, "HF_HOME": str(hub(folder, Path(given.tokenizer))), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=False, timeout=RUN_TIMEOUT_S, env=environment, capture_output=True, text=True)
    found = list(artifacts.glob("**/profile_export_aiperf.json"))
    if not found:
        raise SystemExit(f"AIPerf wrote no result:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    report = json.loads(found[0].read_text())
    times = (report[name]["p50"] for name in ("time_to_first_token", "inter_token_latency"))
    first, between = times
    return first, between, report["request_throughput"]["avg"]


def guidellm(given: argparse.Namespace, load: str, url: str, folder: Path) -> Times:
    """Run GuideLLM."""
    command = [given.guidellm, "run", "--backend", f"kind=openai_http,target={url},model={MODEL}"]
    command += ["--profile", f"kind=concurrent,streams={STREAMS}", "--disable-console"]
    command += [
        "--constraint",
        f"kind=max_requests,count={REQUESTS}",
        "--data",
        f"kind=json_file,path={folder}/vllm.jsonl",
    ]
    command += ["--output", f"kind=json,path={folder}/guidellm.json"]
    done = subprocess.run(command, check=False, timeout=RUN_TIMEOUT_S, capture_output=True, text=True)
    try:
        found = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    except OSError:
        raise SystemExit(f"GuideLLM wrote no result:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}") from None
    first, between = (
        found[f"{name}_ms"]["successful"]["median"] for name in ("time_to_first_token", "inter_token_latency")
    )
    return first, between, found["requests_per_second"]["successful"]["mean"]


VLLM = """
import argparse, sys
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""`vllm bench serve`, which the command of the wheels for CPUs does not find."""


def vllm(given: argparse.Namespace, load: str, url: str, folder: Path) -> Times:
    """Run vLLM's bench."""
    command = [given.vllm, "-c", VLLM, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    command += ["--base-url", url, "--model", MODEL, "--tokenizer", given.tokenizer, "--dataset-name", "custom"]
    command += [
        "--dataset-path",
        str(folder / "vllm.jsonl"),
        "--custom-output-len",
        str(TOKENS),
        "--skip-chat-template",
    ]
    command += ["--max-concurrency", str(STREAMS), "--num-prompts", str(REQUESTS), "--disable-shuffle"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, check=False, timeout=RUN_TIMEOUT_S, env=environment, capture_output=True, text=True)
    try:
        found = json.loads((folder / "vllm.json").read_text())
    except OSError:
        raise SystemExit(f"vLLM's bench wrote no result:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}") from None
    return found["median_ttft_ms"], found["median_tpot_ms"], found["request_throughput"]


def main() -> None:
    """Run the tools, print the comparison, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json and its configuration")
    parser.add_argument("--aiperf", help="the program")
    parser.add_argument("--guidellm", help="the program")
    parser.add_argument("--vllm", help="a Python with vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS)
    given = parser.parse_args()
    tools = [charonia, *(tool for tool in (aiperf, guidellm, vllm) if getattr(given, tool.__name__))]
    record: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    url = f"http://{HOST}:{Exact().port}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_loads(folder)
        for load in given.loads:
            able = [tool for tool in tools if load == "prompts" or tool in (charonia, aiperf)]
            runs: dict[str, list[Times]] = {tool.__name__: [] for tool in able}
            for number in range(given.rounds):
                for tool in able[:: 1 if number % 2 == 0 else -1]:
                    runs[tool.__name__].append(tool(given, load, url, folder))
            for tool_name, each in runs.items():
                first, between, rate = (median(values) for values in zip(*each, strict=True))
                print(
                    f"{load:8} {tool_name:8} first token {first:6.1f} ms, between {between:5.2f} ms, {rate:5.2f}/s",
                    flush=True,
                )
            record[load] = runs
    (RESULTS / "language_tools.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
