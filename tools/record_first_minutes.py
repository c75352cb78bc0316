"""Record the first five minutes: python tools/record_first_minutes.py.

Runs the commands in a terminal of 80 columns, and writes docs/recordings.md with what they print, and the pictures
in docs/images. Ports 8000 to 8002 must be free.
"""

import fcntl
import html
import io
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from onnxruntime.datasets import get_example
from PIL import Image
from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.demo.server import Ports, demand_free
from tests.support.browser import chromium

ROOT = Path(__file__).parents[1]
COLUMNS, ROWS = 80, 50
START_S = 60.0
MODEL = "logreg_iris.onnx"
LAST_LINE = b"this machine only"
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
RIGHT = "[[5,2],[-10,0],[10,0]]"
SERVICE = """\
import charonia


@charonia.model
def greet(name: str) -> str:
    return f"Hello, {name}!"
"""
SCENES = (
    (
        *("file", "A file", f"charonia serve {MODEL}"),
        (
            f"charonia infer -i 'float_input={RIGHT}'",
            f"curl -s localhost:8000/v2/models/logreg_iris/generate -d '{{\"float_input\": {RIGHT}}}'",
        ),
    ),
    (
        *("function", "A function", "charonia serve service.py"),
        (
            "cat service.py",
            'curl -s localhost:8000/v2/models/greet/generate -d \'{"name": "Ada"}\'',
        ),
    ),
    (
        *("mistakes", "Mistakes", f"charonia serve {MODEL}"),
        (
            "charonia serve service.py",
            "charonia infer logreg -i 'float_input=[[5,2]]'",
            "charonia infer -i 'float_inputs=[[5,2]]'",
            "charonia infer -i 'float_input=[[5,2]]'",
            "charonia infer -u localhost:8001 -i 'float_input=[[5,2]]'",
        ),
    ),
    (
        *("speed", "Speed", f"charonia serve {MODEL}"),
        (
            "charonia perf -m logreg_iris --concurrency-range 4 -p 1000 | tail -4",
            "charonia explain",
        ),
    ),
)
"""Name, title, the command of the server, and those in another terminal."""

STYLE = """
body { margin: 0; background: #fff } pre { display: inline-block; margin: 0; padding: 20px 24px; background: #16181d;
color: #d7dae0; font: 14px/1.45 'DejaVu Sans Mono', monospace;
width: 80ch; white-space: pre-wrap; word-break: break-all } b { color: #fff } i { font-style: normal; color: #8a919e }
.bad { color: #ff7b72 } .doubtful { color: #e3b341 } .prompt { color: #79c0ff }
"""
TAGS = {"1": "b", "2": "i", "31": 'span class="bad"', "33": 'span class="doubtful"', "36": 'span class="prompt"'}


def main() -> None:
    """Write the recordings."""
    demand_free(Ports())
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        shutil.copy(get_example(MODEL), Path(folder) / MODEL)
        (Path(folder) / "service.py").write_text(SERVICE)
        parts = [HEAD]
        for name, title, server, commands in SCENES:
            with serving(server, folder) as said:
                text = f"$ {server}\n{said.rstrip()}\n"
                for command in commands:
                    text += f"\n$ {command}\n{run(command, folder).rstrip()}\n"
                if name == "file":
                    page(browser)
            picture(browser, text, name)
            plain = re.sub(r"\033\[[0-9;]*[mK]", "", text)
            parts.append(f"## {title}\n\n![{title}](images/first_{name}.png)\n\n```\n{plain}```\n")
        parts.append("## The page\n\n![The server's page of the model](images/first_page.png)\n")
    (ROOT / "docs" / "recordings.md").write_text("\n".join(parts), encoding="utf-8")


HEAD = """\
# The first five minutes, recorded

Every command and every answer, as a terminal of 80 columns shows them. `python tools/record_first_minutes.py` makes the
page again.
"""


@contextmanager
def serving(command: str, folder: str) -> Iterator[str]:
    """Run a server, and yield what it prints at the start."""
    process, terminal = started(shlex.split(command), folder)
    try:
        yield output(process, terminal, LAST_LINE)
    finally:
        process.send_signal(signal.SIGTERM)
        output(process, terminal)


def run(command: str, folder: str) -> str:
    """Return what a command prints."""
    return output(*started(["bash", "-c", command], folder))


def started(command: Sequence[str], folder: str) -> "tuple[subprocess.Popen[bytes], int]":
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    variables = {**os.environ, "PATH": PATH, "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        variables.pop(name, None)
    process = subprocess.Popen(
        command, cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    return process, ours


def output(process: "subprocess.Popen[bytes]", terminal: int, until: bytes = b"") -> str:
    """Return what is visible of what a program prints, until it ends or has printed the line with a text."""
    found, give_up = b"", time.monotonic() + START_S
    while time.monotonic() < give_up and not (until and re.search(until + rb".*\n", found)):
        if not select.select([terminal], [], [], 0.1)[0]:
            if process.poll() is not None:
                break
            continue
        try:
            found += os.read(terminal, 65536)
        except OSError:  # the program has ended
            break
    text = found.decode(errors="replace").replace("\r\n", "\n").replace("\033[?25l", "").replace("\033[?25h", "")
    if not until:
        process.wait(START_S)
        os.close(terminal)
    # A carriage return begins the line again: of progress, the last is visible.
    return "\n".join(line.rpartition("\r")[2].replace("\033[K", "") for line in text.split("\n"))


def picture(browser: Browser, text: str, name: str) -> None:
    """Write a picture of a terminal with a text."""
    page = browser.new_page(viewport={"width": 900, "height": 600}, device_scale_factor=1.5)
    page.set_content(f"<style>{STYLE}</style><pre>{as_html(text)}</pre>")
    save(page.locator("pre").screenshot(), name)
    page.close()


def as_html(text: str) -> str:
    """Return text with the colours of a terminal as HTML."""
    lines = []
    for line in text.rstrip().split("\n"):
        made, tag = "", ""
        for code, piece in re.findall(r"(?:\033\[([0-9;]*)m)?([^\033]*)", line):
            if code:
                made += f"</{tag.split()[0]}>" if tag else ""
                tag = TAGS.get(code.split(";")[-1], "")
                made += f"<{tag}>" if tag else ""
            made += html.escape(piece)
        made += f"</{tag.split()[0]}>" if tag else ""
        lines.append(f'<span class="prompt">$</span> <b>{made[2:]}</b>' if line.startswith("$ ") else made)
    return "\n".join(lines)


def page(browser: Browser) -> None:
    """Write a picture of the server's page after a request was sent there."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto("http://localhost:8000/")
    page.get_by_role("button", name="Run").first.click()
    page.wait_for_timeout(1500)
    save(page.screenshot(), "page")
    page.close()


def save(png: bytes, name: str) -> None:
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(128)
    image.save(ROOT / "docs" / "images" / f"first_{name}.png", optimize=True)


if __name__ == "__main__":
    main()
