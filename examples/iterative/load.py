"""Measure both models under the same load of texts of differing lengths, by turns.

Usage: python examples/iterative/load.py [--url URL | --serve FOLDER] [--clients N | --rate R] [--requests N]
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from statistics import median, quantiles
from typing import NamedTuple

PROMPTS = ["Once upon a time", "The capital of France is", "A good recipe for bread:", "To reverse a list in Python,"]
COLUMNS = ("tokens/s", "first token p50 ms", "p99 ms", "request p50 ms", "p99 ms")


class Request(NamedTuple):
    at_s: float
    """When it is sent, from the beginning of the run; 0 for as soon as a client is free."""
    prompt: str
    tokens: int


class Answer(NamedTuple):
    tokens: int
    first_s: float
    all_s: float


def requests(count, rate, seed):
    """Return requests: most are for short texts, few for long ones; with a rate they arrive at random (Poisson)."""
    chance, at_s = random.Random(seed), 0.0
    found = []
    for _ in range(count):
        at_s += chance.expovariate(rate) if rate else 0
        found.append(Request(at_s, chance.choice(PROMPTS), min(192, 4 + int(chance.expovariate(1 / 40)))))
    return found


def generate(url, model, request):
    """Return the pieces of a text and when each came."""
    body = {"text_input": request.prompt, "max_tokens": request.tokens, "ignore_eos": True}
    query = urllib.request.Request(f"{url}/v2/models/{model}/generate_stream", json.dumps(body).encode())
    try:
        response = urllib.request.urlopen(query)
    except urllib.error.HTTPError as refused:
        response = refused  # with the reason
    with response:
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"{model}: {event['error']}")
                yield event["text_output"], time.perf_counter()


def run(url, model, sent, clients):
    """Send requests and return tokens per second, and times of first tokens and requests in ms: p50, p99."""
    began = time.perf_counter()

    def answer(request):
        at = began + request.at_s if request.at_s else time.perf_counter()
        time.sleep(max(0.0, at - time.perf_counter()))
        times = [when for _, when in generate(url, model, request)]
        return Answer(len(times), times[0] - at, times[-1] - at)

    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(answer, sent))
    rate = sum(each.tokens for each in answers) / (time.perf_counter() - began)
    first = [1000 * each.first_s for each in answers]
    whole = [1000 * each.all_s for each in answers]
    return rate, *(value for times in (first, whole) for value in (median(times), quantiles(times, n=100)[98]))


def row(name, values):
    return f"| {name} | " + " | ".join(f"{value:,.0f}" for value in values) + " |"


@contextlib.contextmanager
def served(repository):
    """Run a server of a repository and give its URL."""
    command = [sys.executable, "-m", "charonia", "serve", f"--model-repository={repository}", "--port=8600"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = "http://localhost:8600"
    try:
        while server.poll() is None:
            with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/v2/health/ready"):
                yield url
                return
            time.sleep(0.2)
        sys.exit(f"the server did not start; try: {' '.join(command)}")
    finally:
        server.terminate()
        server.wait()


def measure(url, options):
    clients = options.requests if options.rate else options.clients
    models = options.models
    found = {model: [] for model in models}
    for model in models:
        run(url, model, requests(4, 0, 0), 2)  # the first executions take longer
    print(f"| model | {' | '.join(COLUMNS)} |\n|---|{'--:|' * len(COLUMNS)}")
    for seed in range(options.rounds):
        for model in models if seed % 2 == 0 else reversed(models):
            found[model].append(run(url, model, requests(options.requests, options.rate, seed), clients))
            print(row(f"{model}, round {seed + 1}", found[model][-1]), flush=True)
    for model in models:
        print(row(f"{model}, median", [median(each) for each in zip(*found[model], strict=True)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000", help="of a running server")
    parser.add_argument("--serve", metavar="FOLDER", help="start a server of this repository instead")
    parser.add_argument("--models", nargs=2, default=["simple", "iterative"], help="to be compared")
    parser.add_argument("--clients", type=int, default=8, help="clients that wait for each text before the next")
    parser.add_argument("--rate", type=float, default=0, help="requests per second in place of clients")
    parser.add_argument("--requests", type=int, default=64, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with served(options.serve) if options.serve else contextlib.nullcontext(options.url) as url:
        measure(url, options)
