"""The command `charonia`, which dispatches to its subcommands.

Each subcommand is a module of this package with `run(arguments) -> exit status`. It is imported on demand, so that
`charonia --help` does not import the server.

Exit status: 0 done, 1 the command failed, 2 misuse.
"""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from charonia.cli.command_line import unknown

COMMANDS = {
    "serve": "Serve models over HTTP and gRPC: a repository, a model's file, or a Python file with functions.",
    "infer": "Send one request to a model and print the answer.",
    "chat": "Talk to a language model in the terminal.",
    "perf": "Measure how fast a server answers: latency, throughput, under any load.",
    "tune": "Find the configuration of a model that gives the most within your limits.",
    "platform": "Keep models, environments and deployments, with pages and an API.",
    "models": "List and add models in the registry of a platform.",
    "environments": "List and build the Python environments of a platform.",
    "people": "Keys, users and roles of a platform, and who changed what.",
    "deploy": "Deploy a model, a file or a folder on a platform.",
    "apply": "Create or update deployments from files.",
    "rollout": "Watch, roll back and stop rollouts.",
    "upgrade": "Replace the engine and front ends of a running server, without losing a request.",
    "traffic": "Split the requests of a model among its versions, copy them, or move them by a canary plan.",
    "explain": "Show how a model was served in the last minute, its bottleneck, and what to change.",
    "config": "Print the complete configuration of a model and its inferred parts.",
    "convert": "Convert an estimator, a TensorFlow or a PyTorch model to ONNX, and check it against the original.",
    "export": "Write models as resources of KServe: a runtime and services.",
    "key": "Create an API key for a server that requires one.",
    "doctor": "Check what this machine can run, and the needs of a repository.",
    "demo": "Serve models that packages ship and send them real inputs.",
}
"""Summary by name, which is also the name of the module."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        # With a file name, it is about that file, and the command should have reported it.
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _discard_output()
        print(f"charonia: the output cannot be written: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return 1


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _discard_output() -> None:
    """Close what takes no more output: Python would flush it again at exit, and report an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    match arguments:
        case [] | ["--help"] | ["-h"] | ["help"]:
            print(usage(), file=sys.stdout if arguments else sys.stderr)
            return 0 if arguments else 2
        case ["--version"] | ["version"]:
            from charonia.version import __version__

            print(f"charonia {__version__}")
            return 0
        case ["help", name] if name in COMMANDS:
            return _run([name, "--help"])
        case ["help", name, *_]:
            arguments = [name]
        case [name, *rest] if name in COMMANDS:
            status: int = import_module(f"charonia.cli.{name}").run(rest)
            return status
    print(f"charonia: {unknown_command(arguments[0])}", file=sys.stderr)
    return 2


def usage() -> str:
    """Return the help of the command itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: charonia COMMAND [OPTIONS]",
            "",
            "An inference server for Triton model repositories.",
            "",
            "commands:",
            *lines,
            "",
            "`charonia COMMAND --help` explains one; `charonia --version` prints the version.",
        ]
    )


def unknown_command(name: str) -> str:
    """Return the message about an unknown command."""
    if name.startswith("-"):
        return f"unknown option '{name}' (hint: options follow the command: charonia serve {name})"
    return unknown("command", name, list(COMMANDS))
