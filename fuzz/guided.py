"""Fuzzing that coverage guides: inputs that reach new branches are kept and changed again.

    python -m fuzz.guided [TARGET...] --minutes M   # so long for each target; needs atheris
    python -m fuzz.guided [TARGET...]               # only the inputs in fuzz/corpora

A target reads what others send: whatever the bytes are, it accepts them or raises a `ServingError`, and its other
invariants hold. For the seeded fuzzers, the bytes are their source of random numbers. A search begins with the saved
inputs. An input that breaks a target is left in `.fuzz`: repair the fault and add the file to `fuzz/corpora`.
"""

import argparse
import asyncio
import logging
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from fuzz import fuzz_channel, fuzz_grpc, fuzz_http, fuzz_pbtxt

from charonia.config.json_form import from_json
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.pbtxt import parse
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.platform.artifacts.archives import SUFFIXES, extract
from charonia.platform.deployments.spec import changes, read_spec
from charonia.tools.perf.data.load import read_json
from charonia.tools.perf.data.spec import ModelSpec, TensorSpec
from charonia.wire.form_bodies import form_document
from charonia.wire.json_text import parse_object
from charonia.wire.openai_answer import decode_embeddings_request
from charonia.wire.openai_models import CHAT, COMPLETIONS, EMBEDDINGS
from charonia.wire.openai_request import check_engine_request, decode_text_request
from charonia.wire.openai_responses import chat_request
from charonia.wire.v1_predict import decode_predict
from charonia.wire.v2_control import decode_load
from charonia.wire.v2_generate import decode_generate
from charonia.wire.v2_request import InferDecoder

CORPORA = Path(__file__).parent / "corpora"
INPUT_BYTES_MAX = 4096
LOOP = asyncio.new_event_loop()
CONFIG = ModelConfig(
    name="m",
    max_batch_size=4,
    input=(
        ModelInput("text_input", DataType.BYTES, dims=(1,)),
        ModelInput("x", DataType.FP32, dims=(-1,), optional=True),
        ModelInput("n", DataType.INT64, dims=(1,), optional=True),
        ModelInput("b", DataType.BOOL, dims=(2,), optional=True),
    ),
    output=(ModelOutput("text_output", DataType.BYTES, (1,)),),
)
SPEC = ModelSpec("m", "", 8, (TensorSpec("X", DataType.FP32, (2, 2)), TensorSpec("S", DataType.BYTES, (-1,))), ())
TENSOR_BYTES_MAX = 1 << 16
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class BytesAsRandom(random.Random):
    """Gives the bytes of an input as random numbers, then zeros: the input decides what a seeded fuzzer does."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data
        self._position = 0

    def getrandbits(self, k: int) -> int:
        """Return the next k bits, of whole bytes."""
        size = (k + 7) // 8
        piece = self._data[self._position : self._position + size]
        self._position += size
        return int.from_bytes(piece, "little") & ((1 << k) - 1)

    def random(self) -> float:
        """Return a number from 0 to 1, of two bytes."""
        return self.getrandbits(16) / (1 << 16)


def _connection(data: bytes) -> None:
    """Send bytes as a client's session, whole and split."""
    whole, split = (LOOP.run_until_complete(fuzz_http.answers_to(data, piece)) for piece in (0, 7))
    assert fuzz_http.essence(whole) == fuzz_http.essence(split)


def _infer(data: bytes) -> None:
    size = int.from_bytes(data[:2], "little")
    InferDecoder(TENSOR_BYTES_MAX).decode("m", "", data[2:], size or None)


def _pbtxt(data: bytes) -> None:
    config = fuzz_pbtxt.read(parse, data.decode(errors="surrogateescape"))
    if config is not None:
        fuzz_pbtxt.check(config)


def _config_json(data: bytes) -> None:
    config, files = decode_load(data)
    assert all(isinstance(content, bytes) for content in files.values())
    read = fuzz_pbtxt.read(from_json, config or "")
    if read is not None:
        fuzz_pbtxt.check(read)


def _openai(data: bytes) -> None:
    """Read a document as each of the API's requests."""
    document = parse_object(data)
    readers: list[Callable[[], object]] = [
        lambda: decode_text_request(CONFIG, dict(document), is_chat=True),
        lambda: decode_text_request(CONFIG, dict(document), is_chat=False),
        lambda: decode_embeddings_request(document),
        lambda: decode_text_request(CONFIG, chat_request(document, []), is_chat=True),
        *(partial(check_engine_request, route, document) for route in (CHAT, COMPLETIONS, EMBEDDINGS)),
    ]
    for read in readers:
        with suppress(ServingError):
            read()


def _generate(data: bytes) -> None:
    with suppress(ServingError):
        decode_generate(CONFIG, "", data, TENSOR_BYTES_MAX)
    decode_predict(CONFIG, data, TENSOR_BYTES_MAX)


def _form(data: bytes) -> None:
    head, _, body = data.partition(b"\n")
    content_type, _, query = head.partition(b"?")
    form = form_document(CONFIG, content_type, b"/v2/models/m/generate?" + query, body)
    decode_generate(CONFIG, "", body, TENSOR_BYTES_MAX, form)


def _archive(data: bytes) -> None:
    """Unpack an archive: nothing is written outside of its folder."""
    suffix, content = SUFFIXES[int.from_bytes(data[:1]) % len(SUFFIXES)], data[1:]
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name, "target")
        folder.mkdir()
        archive = Path(name, "archive" + suffix)
        archive.write_bytes(content)
        try:
            extract(archive, archive.name, folder)
        finally:
            assert sorted(each.name for each in Path(name).iterdir()) == sorted([archive.name, "target"])
            assert not any(each.is_symlink() for each in folder.rglob("*"))


def _specification(data: bytes) -> None:
    spec = read_spec(parse_object(data))
    assert read_spec(spec.model_dump(mode="json")) == spec
    changes(None, spec)


def _input_data(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        file = Path(folder, "data.json")
        file.write_bytes(data)
        read_json(file, SPEC)


TARGETS: Mapping[str, Callable[[bytes], object]] = {
    "http": _connection,
    "http_sessions": lambda data: LOOP.run_until_complete(fuzz_http.check_connection(BytesAsRandom(data))),
    "infer_json": _infer,
    "grpc_messages": lambda data: fuzz_grpc.check_message(BytesAsRandom(data)),
    "grpc_sessions": lambda data: LOOP.run_until_complete(fuzz_grpc.check_connection(BytesAsRandom(data))),
    "pbtxt": _pbtxt,
    "load": _config_json,
    "channel": lambda data: fuzz_channel.check(BytesAsRandom(data)),
    "openai": _openai,
    "generate": _generate,
    "forms": _form,
    "archives": _archive,
    "specifications": _specification,
    "input_data": _input_data,
}


def replay(name: str, data: bytes) -> None:
    """Give an input to a target.

    Raises:
        Exception: Anything but a `ServingError`: the target is broken.
    """
    with suppress(ServingError):
        TARGETS[name](data)


def saved(name: str) -> Iterator[Path]:
    """Return the inputs of a target in the repository."""
    yield from sorted((CORPORA / name).iterdir())


def fuzz(name: str, arguments: Sequence[str]) -> None:
    """Run libFuzzer in this process, which ends with it. `charonia` was imported with instrumentation."""
    import atheris

    log = fuzz_http.FaultLog()
    logging.getLogger("charonia").addHandler(log)

    def one(data: bytes) -> None:
        replay(name, data)
        assert not log.records, log.records

    atheris.Setup(["fuzz", *arguments], one)
    atheris.Fuzz()


REPORT_CHARS = 4000
IN_CHILD = """
import sys, atheris
with atheris.instrument_imports(include=["charonia"]):
    from fuzz import guided
guided.fuzz(sys.argv[1], sys.argv[2:])
"""


def search(name: str, minutes: float, found: Path) -> bool:
    """Search for inputs that break a target, print what came of it, and return whether the target held.

    Args:
        found: Folder of inputs that have reached new branches, of earlier searches, too.
    """
    found.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [
            *(sys.executable, "-c", IN_CHILD, name, f"-max_total_time={60 * minutes:.0f}", "-print_final_stats=1"),
            *(
                f"-max_len={INPUT_BYTES_MAX}",
                "-timeout=20",
                "-rss_limit_mb=2048",
                f"-artifact_prefix={found}-",
                str(found),
                str(CORPORA / name),
            ),
        ],
        check=False,
        cwd=CORPORA.parents[1],
        capture_output=True,
        text=True,
        errors="replace",
    )
    log = done.stdout + done.stderr
    if done.returncode:
        print(*(text[-REPORT_CHARS:] for text in (done.stdout, done.stderr)), sep="\n")
    executed = re.search(r"number_of_executed_units: (\d+)", log)
    count = len(list(found.iterdir()))
    print(
        f"{name}: {int(executed[1]) if executed else 0:,} executions, {count} inputs reached new branches", flush=True
    )
    return done.returncode == 0


def main(arguments: Sequence[str]) -> int:
    """Run as a program; return the exit status, 1 if a target is broken."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.guided", description=__doc__.splitlines()[0])
    parser.add_argument(
        "targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET", help=f"default: all: {', '.join(TARGETS)}"
    )
    parser.add_argument(
        "--minutes", type=float, default=0, help="of search for each target (default: only the saved inputs)"
    )
    parser.add_argument("--found", type=Path, default=CORPORA.parents[1] / ".fuzz", metavar="FOLDER")
    options = parser.parse_args(arguments)
    broken = []
    for name in options.targets or TARGETS:
        for path in saved(name):
            replay(name, path.read_bytes())
        if options.minutes and not search(name, options.minutes, options.found / name):
            broken.append(name)
    print(f"broken: {', '.join(broken)}" if broken else "nothing found")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
