"""`charonia export kserve PATH`: a repository, or one model, as resources of KServe.

The objects go to standard output, or with `-o` to a folder, a file each. Exit status: 0 done, 1 the models cannot be
exported like that, 2 misuse.
"""

import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from charonia.cli.command_line import CommandLine, Option, carry_out, flag, unknown
from charonia.cli.values import choice, filled, integer
from charonia.config.backends import ENSEMBLE, formats, record_of
from charonia.config.model import ModelConfig
from charonia.core.errors import not_found, unsupported
from charonia.export.kserve import ExportedModels, Json, kserve_objects
from charonia.export.options import PERCENT_MAX, REPLICAS_MAX, KserveOptions, Mode, Protocol, RuntimeScope, ScaleMetric

# fmt: off
KSERVE = CommandLine(
    command="charonia export kserve",
    intro="""\
usage: charonia export kserve [OPTIONS] PATH

Write a ServingRuntime and an InferenceService for a repository, or for one model.
""",
    groups={
        "Options": (
            Option("PATH", "path", filled, "PATH", "A repository, a model's folder, or its file"),
            Option("--storage-uri", "storage_uri", filled, "URI", "The same files as a URI for KServe: s3://..., pvc://..."),
            Option("--output -o", "output", filled, "DIR", "Folder for the resources, a file each", default="stdout"),
            Option("--name", "name", filled, "NAME", "Name of the InferenceService", default="PATH's name"),
            Option("--namespace", "namespace", filled, "NAME", "Its namespace", default="that of kubectl"),
            Option("--image", "image", filled, "IMAGE", "Image of the server"),
            Option("--runtime", "runtime", filled, "NAME", "Name of the runtime", default="that of the service"),
            Option("--scope", "scope", choice(RuntimeScope), "cluster|namespace",
                   "Whether the runtime is a ClusterServingRuntime or a ServingRuntime"),
            Option("--mode", "mode", choice(Mode), "knative|standard",
                   "Whether KServe runs it with Knative, or as a plain Deployment"),
            Option("--protocol", "protocol", choice(Protocol), "v2|grpc-v2|v1", "Protocol of the clients"),
            Option("--argument", "arguments", filled, "ARGUMENT", "Another argument for charonia serve; repeatable",
                   tuple, default=""),
        ),
        "Replicas": (
            Option("--cpu", "cpu", filled, "CORES", "Cores of a replica"),
            Option("--memory", "memory", filled, "SIZE", "Memory of a replica"),
            Option("--gpus", "gpus", integer(0), "N", "NVIDIA GPUs of a replica"),
            Option("--min-replicas", "replicas_min", integer(0, REPLICAS_MAX), "N",
                   "Fewest replicas; 0: scale to zero without requests", default="KServe's"),
            Option("--max-replicas", "replicas_max", integer(1, REPLICAS_MAX), "N", "Most replicas",
                   default="KServe's"),
            Option("--scale-metric", "scale_metric", choice(ScaleMetric), "concurrency|rps|cpu|memory|busy-share",
                   "Metric for scaling the replicas", default="KServe's"),
            Option("--scale-target", "scale_target", integer(1), "N",
                   "Value of the metric for each replica; per cent of all but requests", default="KServe's; 70"),
            Option("--prometheus", "prometheus", filled, "URL", "Where KEDA reads the busy share"),
            Option("--canary-percent", "canary_percent", integer(0, PERCENT_MAX), "N",
                   "Share of the traffic that the new revision gets", default="all"),
            Option("--canary-uri", "canary_uri", filled, "URI", "The new models, in standard mode"),
        ),
        "Several models": (
            flag("--multi-model", "multi_model", True, "Add the models to a running service, as TrainedModels"),
            Option("--model-memory", "model_memory", filled, "SIZE",
                   "Memory of each such model; it cannot be changed later", default="equal shares"),
            flag("--transformer", "transformer", True,
                 "Divide an ensemble: one step is the predictor, the others run in a transformer"),
            Option("--predictor", "predictor", filled, "STEP", "The step of the ensemble that is the predictor",
                   default="the only one that computes"),
        ),
    },
    record=KserveOptions(),
)
# fmt: on

TRUST = "--trust"
"""Argument of `charonia serve` for pickles."""

_USAGE = "usage: charonia export {kserve} [OPTIONS] PATH"


def run(arguments: Sequence[str]) -> int:
    match arguments:
        case ["kserve", *rest]:
            return carry_out(KSERVE, rest, _kserve)
        case ["--help" | "-h"]:
            print(f"{_USAGE}\n\nWrite models as resources of another system. `charonia export kserve --help` has more.")
            return 0
        case [name, *_]:
            print(f"charonia export: {unknown('target', name, ['kserve'])}", file=sys.stderr)
    print(_USAGE, file=sys.stderr)
    return 2


def _kserve(options: KserveOptions) -> int:
    models = models_at(options.path, is_trusted=TRUST in options.arguments)
    objects = kserve_objects(models, options)
    if not options.output:
        print("---\n".join(_yaml(each) for each in objects.values()), end="")
        return 0
    for name, text in files_of(objects).items():
        path = Path(options.output, name)
        state = "unchanged" if path.is_file() and path.read_text(encoding="utf-8") == text else "written"
        if state == "written":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{path} {state}")
    return 0


def files_of(objects: Mapping[str, Json]) -> dict[str, str]:
    """Return the text of each file by name, in the order in which to apply the files."""
    return {f"{number:02}-{name}.yaml": _yaml(each) for number, (name, each) in enumerate(objects.items(), 1)}


def models_at(path: str, *, is_trusted: bool = False) -> ExportedModels:
    """Return the models at a path. Blocks on the disk.

    Args:
        is_trusted: Whether the server may read files that can run any code (--trust).
    """
    # Imported late, because it imports schema, which `--help` does not need.
    from charonia.server.files.served_files import sort
    from charonia.server.lifecycle.repository.model_folder import read_config
    from charonia.server.lifecycle.repository.scan import folder_at, scan

    given, place = sort([path], is_named=True), Path(path).expanduser().absolute()
    if not place.exists():
        raise not_found(f"there is nothing at '{path}'", hint="a repository, a model's folder, or its file")
    if given.files:
        file, form = given.files[0]
        name = place.stem if place.is_file() else place.name
        model = ModelConfig(name=name, backend=form.backend, default_model_filename=form.filename)
        if record_of(model.backend).trust_parameter and not is_trusted and not zipfile.is_zipfile(file):
            raise unsupported(
                f"'{file}' is a pickle, which can run any code when it is read: the server would refuse it",
                hint=f"if you made the file or trust who did: --argument={TRUST}",
            )
        return ExportedModels(name, (model,), is_repository=False)
    is_repository = not (given.models or given.loose)
    folders = scan([place], fingerprints=False).models.values() if is_repository else [folder_at(place)]
    models = []
    for folder in folders:
        config, _ = read_config(folder)
        config = replace(config or ModelConfig(), name=folder.name)
        models.append(config if config.backend or config.platform else _with_backend(config, folder.path))
    return ExportedModels(place.name, tuple(models), is_repository)


def _with_backend(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return a configuration with the backend of the model's file, where a version has one that is known."""
    if config.ensemble_scheduling is not None:
        return replace(config, platform=ENSEMBLE)
    names = {entry.name for version in (folder, *sorted(folder.glob("[0-9]*"))) for entry in version.glob("*")}
    known = next((each for each in formats() if each.filename in names), None)
    if known is None:
        return config
    return replace(config, backend=known.backend, default_model_filename=known.filename)


def _yaml(document: Json) -> str:
    import yaml

    text: str = yaml.safe_dump(document, sort_keys=False, width=120)
    return text
