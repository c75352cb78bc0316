"""The options of an application, from Python, from `serve run` or from a file of `serve deploy`."""

import shlex
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from charonia.cli.serve import parse
from charonia.core.errors import ServingError
from charonia.server.access.rules import parse_keys
from charonia.server.embedding import LOOPBACK
from charonia.server.model_options import ControlMode
from charonia.server.options import ServerOptions


class AppOptions(BaseModel):
    """Options of `charonia.ray.app`. Texts of `serve run NAME=VALUE` are read as the type of the field.

    Attributes:
        repository: Folder of models, or several, as every replica finds them; or URIs of object stores.
        options: Options of `charonia serve`, in a list or as one text: "--model-control-mode=auto --cache-config=...".
        name: Name of the deployment.
        num_cpus: Cores of a replica: Ray reserves them, and the engine uses no more.
        num_gpus: GPUs of a replica: it sees only the GPUs that Ray assigns to it.
        min_replicas: Smallest number of replicas.
        max_replicas: Largest number of replicas; the same as `min_replicas` for a fixed number.
        target_ongoing_requests: Requests in flight for each replica that Ray aims at between these bounds.
        autoscaling: Other fields of Ray's `autoscaling_config`, such as `upscale_delay_s` and `downscale_delay_s`.
        max_ongoing_requests: Most requests in flight in a replica; others wait in Ray's proxy. Batches are made of
            requests in flight, so use at least twice the largest batch of all instances together.
        drain_s: Seconds that the requests in flight of a replica have when it is stopped.
        address: Address on which each replica also listens itself, on free ports: "0.0.0.0" for other machines, too.
        elsewhere: Applications of models that Python models call and that other applications have, by model.
        models_per_replica: Most models that a replica holds for requests with `serve_multiplexed_model_id`; 0 for no
            multiplexing. Needs `--model-control-mode=auto` or `explicit`.
        keys: Lines of a file of API keys, in place of `--api-keys` in options. Give keys as `sha256:...`: Ray shows
            them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    repository: str | list[str]
    options: list[str] = []
    name: str = "charonia"
    num_cpus: float = Field(default=1.0, gt=0)
    num_gpus: float = Field(default=0.0, ge=0)
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=0, ge=0)
    target_ongoing_requests: float = Field(default=32.0, gt=0)
    autoscaling: dict[str, Any] = {}
    max_ongoing_requests: int = Field(default=256, ge=1)
    drain_s: float = Field(default=30.0, gt=0)
    address: str = Field(default=LOOPBACK, min_length=1)
    elsewhere: dict[str, str] = {}
    models_per_replica: int = Field(default=0, ge=0)
    keys: list[str] = []

    @field_validator("options", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return shlex.split(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "AppOptions":
        try:
            server = self.server_options()
        except ServingError as error:
            raise ValueError(str(error)) from None
        if self.max_replicas and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas: expected at least min_replicas ({self.min_replicas}), got {self.max_replicas}"
            )
        if self.autoscaling and self.max_replicas <= self.min_replicas:
            raise ValueError("autoscaling: expected max_replicas above min_replicas, too; their number is fixed")
        if server.front_ends > 0:
            raise ValueError("--front-ends: a replica is one process (hint: more replicas)")
        if self.keys and server.api_keys:
            raise ValueError("keys: expected no --api-keys in options")
        if problems := parse_keys("\n".join(self.keys)).problems:
            raise ValueError(f"keys: {'; '.join(problems)}")
        if self.models_per_replica and server.models.control_mode not in (ControlMode.AUTO, ControlMode.EXPLICIT):
            raise ValueError("models_per_replica: expected --model-control-mode=auto or explicit in options, too")
        return self

    @property
    def repositories(self) -> list[str]:
        return [self.repository] if isinstance(self.repository, str) else self.repository

    def server_options(self) -> ServerOptions:
        """Return the options of each replica's server.

        Raises:
            ServingError: INVALID_ARG for options that `charonia serve` would refuse.
        """
        arguments = [f"--model-repository={path}" for path in self.repositories]
        arguments += [f"--exit-timeout-secs={round(self.drain_s)}", f"--cpu-cores={max(1, int(self.num_cpus))}"]
        arguments.append("--busy-poll-us=0")  # Ray has work for the event loop, too
        options, _ = parse([*arguments, *self.options], {})
        return replace(
            options,
            http=replace(options.http, enabled=True, address=self.address, port=0),
            grpc=replace(options.grpc, enabled=True, address=self.address, port=0),
            metrics=replace(options.metrics, enabled=True, address="", port=0),
        )
