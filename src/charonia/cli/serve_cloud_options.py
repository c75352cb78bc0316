"""The options of `charonia serve` for Amazon SageMaker and Google Vertex AI, and what their environments set."""

from collections.abc import Mapping
from typing import Any

from charonia.cli.command_line import Option
from charonia.cli.values import boolean, filled, integer
from charonia.server.options import PORT_MAX

_BOOL = "true|false"
_PORT = integer(0, PORT_MAX)


def _port_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not dash:
        raise ValueError(f"expected FIRST-LAST, such as 8081-9000, got '{text}'")
    return integer(1, PORT_MAX)(first), integer(1, PORT_MAX)(last)


CLOUDS = (
    Option("--allow-sagemaker", "clouds.sagemaker", boolean, _BOOL, "Serve the routes of Amazon SageMaker"),
    Option("--sagemaker-port", "clouds.sagemaker_port", _PORT, "PORT", "Port of SageMaker's routes"),
    Option(
        *("--sagemaker-safe-port-range", "clouds.safe_ports", _port_range, "FIRST-LAST"),
        "Ports that other endpoints may have beside SageMaker's",
        default="any",
    ),
    Option(
        *("--allow-vertex-ai", "clouds.vertex_ai", boolean, _BOOL),
        "Serve the routes of Google Vertex AI; true if AIP_MODE=PREDICTION, which turns HTTP and gRPC off by default",
    ),
    Option(
        *("--vertex-ai-port", "clouds.vertex_ai_port", _PORT, "PORT"),
        "Port of Vertex AI's routes; AIP_HTTP_PORT, if that is set",
    ),
    Option(
        *("--vertex-ai-default-model", "clouds.vertex_ai_model", filled, "NAME"),
        "Model that predictions run; by default the only one",
        default="none",
    ),
)


def vertex_ai_options(environment: Mapping[str, str], given: Mapping[str, object]) -> dict[str, Any]:
    """Return the options that the environment of Vertex AI sets; `given` are the options of the command line.

    Raises:
        ValueError: AIP_HTTP_PORT is not a port.
    """
    found: dict[str, Any] = {}
    if environment.get("AIP_MODE") == "PREDICTION":
        found |= {"clouds.vertex_ai": True, "http.enabled": False, "grpc.enabled": False}
    if not given.get("clouds.vertex_ai", found.get("clouds.vertex_ai")):
        return {} if "clouds.vertex_ai" in given else found
    if environment.get("AIP_HTTP_PORT"):
        try:
            found["clouds.vertex_ai_port"] = integer(1, PORT_MAX)(environment["AIP_HTTP_PORT"])
        except ValueError as error:
            raise ValueError(f"environment variable AIP_HTTP_PORT: {error}") from error
    if environment.get("AIP_STORAGE_URI"):
        found["models.repositories"] = (environment["AIP_STORAGE_URI"],)
    return found
