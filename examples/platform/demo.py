"""The platform's demo: two models from installed packages are added, deployed, replaced under load, and rolled back.

Usage: python -m examples.platform.demo [--once] [--data FOLDER]
"""

import argparse
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import charonia
from charonia.client import Client

from ..demo.repository import CONTENT_TYPE
from ..ocr.make_repository import TEXT_DETECTION
from . import models
from .load import Load
from .process import LOOK_S, Platform, running_platform, until

PORT = 8080
DEPLOYMENT = "documents"

CANARY = {
    "version": 2,
    "steps": [10, 50, 100],
    "step_seconds": 3,
    "samples_min": 50,
    "significance": 0.05,
    "p99_ratio_max": 3,
}
CANARY_TIMEOUT_S = 600.0


def run(data: Path, once: bool) -> None:
    """Run the demo, then wait for Ctrl-C, unless it runs once. At the end, everything it started has stopped.

    Raises:
        charonia.ServingError: Something that it needs is not there, or a step failed.
    """
    with running_platform(data, 0 if once else PORT) as platform:
        print(f"The platform runs at {platform.url}, its data is in {data}")
        try:
            clean(platform)
            show(platform, data / "demo-models")
            if not once:
                print(next_steps(platform), flush=True)
                platform.process.wait()
        except KeyboardInterrupt:
            print("\nStopping.", flush=True)
        finally:
            if platform.process.poll() is None:
                platform.remove(DEPLOYMENT)


def clean(platform: Platform) -> None:
    """Remove what an earlier run has left."""
    platform.remove(DEPLOYMENT)
    for model in (CONTENT_TYPE, TEXT_DETECTION):
        if platform.there("models", model):
            platform.call("DELETE", "models", model)


def show(platform: Platform, folder: Path) -> None:
    title("Two models: their files are sent, and checked on arrival")
    add(platform, models.content_type(folder))
    add(platform, models.text_detection(folder))

    title(f"One deployment of both, '{DEPLOYMENT}'")
    first = deploy(platform, spec([1]))
    show_answers(first["http"])

    title("Version 2, whose graph is simpler, next to version 1")
    add(platform, models.folded_content_type(folder))
    with Load(first["http"], CONTENT_TYPE, {"bytes": models.files()["README.md"]}) as load:
        second = deploy(platform, spec([1, 2], {"weights": {"1": 100}}))
        print(f"    meanwhile {load.summary()}")
        title("A canary plan under load")
        run_canary(platform, second["revision"])
        print(f"    {load.summary()}")

        title("Back, with one call")
        plan = platform.call("POST", "deployments", DEPLOYMENT, "rollback", body={"to": second["revision"]})
        say_plan(platform, plan)
        load.count_anew()
        until(lambda: load.answers.total() >= 100, "100 answers", 60)
        print(f"    {load.summary()}")


def spec(versions: Sequence[int], traffic: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the specification of the deployment with versions of the model of content types."""
    content_type = {"name": CONTENT_TYPE, "versions": versions, **({"traffic": traffic} if traffic else {})}
    return {"name": DEPLOYMENT, "models": [content_type, {"name": TEXT_DETECTION}]}


def add(platform: Platform, folder: Path) -> None:
    """Add a version of a model from its folder, and print the platform's findings."""
    source = {"kind": "upload", "place": platform.send_folder(folder)}
    added = platform.call("POST", "models", folder.name, "versions", body={"source": source})
    place = ("models", folder.name, "versions", added["number"])

    def checked() -> Any:
        version = platform.call("GET", *place)
        return version if version["state"] in ("ready", "refused") else None

    version = until(checked, f"{folder.name} is checked", 120)
    report = version["report"]
    if version["state"] == "refused":
        raise charonia.ServingError(charonia.Code.INVALID_ARG, f"{folder.name}: {report['problem']}")
    signature = " -> ".join(
        ", ".join(f"{each['name']} {each['data_type']} {each['shape']}" for each in report[kind])
        for kind in ("inputs", "outputs")
    )
    print(f"    {folder.name}/{added['number']}: {version['size'] / 1e6:.1f} MB, {report['backend']}, {signature}")


def deploy(platform: Platform, wanted: Mapping[str, Any]) -> Any:
    """Create or update the deployment, and return it when it serves."""
    return say_plan(platform, platform.call("PUT", "deployments", DEPLOYMENT, body=wanted))


def say_plan(platform: Platform, plan: Mapping[str, Any]) -> Any:
    """Print the changes of a revision and its address; return the deployment when it serves."""
    begin = time.monotonic()
    for change in plan["changes"]:
        print(f"    {change}")
    view = platform.until_serving(DEPLOYMENT, plan["revision"])
    took_s = time.monotonic() - begin
    print(f"    revision {plan['revision']} serves after {took_s:.1f} s: {view['http']}, gRPC {view['grpc']}")
    return view


def show_answers(address: str) -> None:
    """Print the models' answers for some files and a page."""
    with Client(address) as client:
        for name, content in models.files().items():
            found = client.infer(CONTENT_TYPE, {"bytes": content}, {"target_label": 1})["target_label"]
            score, _, label = found.item().decode().split(":")
            print(f"    {name:<14} {label} ({float(score):.3f})")
        (probability,) = client.infer(TEXT_DETECTION, {"x": models.page()}).outputs.values()
        print(f"    {'page.png':<14} {models.line_count(probability)} lines of text")


def run_canary(platform: Platform, revision: int) -> None:
    """Run a canary plan and print its messages, until it is over and its result is a revision."""
    place = ("deployments", DEPLOYMENT, "traffic")
    platform.call("POST", *place, body={"model": CONTENT_TYPE, "canary": CANARY})
    said, give_up = 0, time.monotonic() + CANARY_TIMEOUT_S
    while True:
        traffic = platform.call("GET", *place, query={"model": CONTENT_TYPE})
        for entry in traffic["history"][said:]:
            print(f"    {entry['time'][11:19]} {entry['text']}", flush=True)
        said = len(traffic["history"])
        if traffic["canary"]["state"] in ("finished", "rolled_back"):
            break
        if time.monotonic() > give_up:
            waits_for = traffic["canary"]["waits_for"]
            raise charonia.ServingError(charonia.Code.UNAVAILABLE, f"the canary plan waits for {waits_for}")
        time.sleep(LOOK_S)
    for check in traffic["canary"]["checks"].values():
        print(f"    {check}")
    if traffic["canary"]["state"] == "finished":
        view = platform.until_serving(DEPLOYMENT, revision + 1)
        print(f"    written down as revision {view['revision']}")


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def next_steps(platform: Platform) -> str:
    view = platform.call("GET", "deployments", DEPLOYMENT)
    return f"""
The platform and the deployment keep running; end them with Ctrl-C.

    pages     {platform.link}   (signs you in, once)
    HTTP      {view["http"]}
    gRPC      {view["grpc"]}
    metrics   {view["metrics"]}
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--once", action="store_true", help="end after the story, and use a free port")
    parser.add_argument("--data", type=Path, default=Path("platform-demo"), help="the platform's data folder")
    given = parser.parse_args(arguments)
    # Like Ctrl-C: unwinds the stack, so that everything is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(given.data.resolve(), given.once)
    except KeyboardInterrupt:  # before there was anything to stop
        return 130
    except charonia.ServingError as error:
        print(f"platform demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
