"""The options of `charonia serve` under KServe. Those with underscores are what KServe itself gives."""

from charonia.cli.command_line import Option, flag
from charonia.cli.values import filled

KSERVE = (
    Option(
        *("--model_name", "models.files.model_name", filled, "NAME"),
        "Name of the model at PATH, if that is one model and no repository; KServe gives that of its service",
    ),
    Option(
        *("--predictor", "models.files.predictor", filled, "MODEL"),
        "The model of the repository that another server runs: requests to it are passed on",
    ),
    Option(
        *("--predictor_host", "models.files.predictor_host", filled, "HOST"),
        "The server that runs the model of --predictor; KServe gives it to transformers",
    ),
    flag("--kserve-v1", "http.kserve_v1", True, "Serve KServe's v1 protocol, POST /v1/models/MODEL:predict"),
)
