"""The HTTP and gRPC endpoints of one process, with keys, gates, TLS and access log."""

import asyncio
import logging
import os
import ssl
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace

from charonia.core.errors import invalid
from charonia.server.access.key_file import LOOK_S, KeyFile
from charonia.server.access.options import forwarded_headers, grpc_gate, http_gate
from charonia.server.access_log import AccessLog, LogStream
from charonia.server.closing import close_safely
from charonia.server.facade import Engine, Services
from charonia.server.grpc.frontend import GrpcFrontend, GrpcLimits
from charonia.server.http.clouds import SageMaker, VertexAi
from charonia.server.http.frontend import HttpFrontend
from charonia.server.listening import check_address
from charonia.server.log_file import LogFile
from charonia.server.metrics.processes import Traffic
from charonia.server.model_options import ControlMode
from charonia.server.options import EndpointTls, ModelOptions, ServerOptions
from charonia.server.request_log import RequestRecorder
from charonia.wire.browsers import listens_locally
from charonia.wire.log_settings import AccessLogFormat, LogOptions

_log = logging.getLogger(__name__)

SAGEMAKER, VERTEX_AI = "Sagemaker", "Vertex AI"
KSERVE_MOUNT = "/mnt/models"
"""Where KServe puts models: it runs a server that has this folder."""


def allowed_hosts(options: ServerOptions, address: str, *, has_keys: bool = False) -> tuple[str, ...] | None:
    """Return `Services.allowed_hosts` of an endpoint that listens at an address, and may require keys."""
    hosts = options.http.allowed_hosts
    return hosts if hosts or (listens_locally(address) and not has_keys) else None


def mount_sockets(models: ModelOptions) -> dict[str, str]:
    """Return the sockets of applications by path: they are in the repository made for files, the last one."""
    return {each.path: each.socket(models.repositories[-1]) for each in models.files.mounts}


class Endpoints:
    """The endpoints of this process.

    Attributes:
        http: The HTTP front end, where it is on and started.
        grpc: The gRPC front end, where it is on and started.
        clouds: The front ends of SageMaker and Vertex AI, where they are on and started.
    """

    def __init__(self, options: ServerOptions) -> None:
        """Read the keys. Raises ServingError, INVALID_ARG, when they cannot be read."""
        self.http: HttpFrontend | None = None
        self.grpc: GrpcFrontend | None = None
        self.clouds: list[HttpFrontend] = []
        self._options = options
        self._files = ExitStack()
        self._request_log: RequestRecorder | None = None
        self._keys = KeyFile(options.api_keys) if options.api_keys else None
        self._certificates: list[Certificate] = []
        self._watcher: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Check that the addresses are free. Raises as `start`."""
        for endpoint in (self._options.grpc, self._options.http):
            if endpoint.enabled and endpoint.port:
                await check_address(endpoint.address, endpoint.port, reuse_port=endpoint.reuse_port)

    async def start(self, engine: Engine, services: Services) -> None:
        """Listen.

        Args:
            services: The services of the engine's side.

        Raises:
            ServingError: An endpoint cannot be opened, or the access log not be written.
        """
        options = self._options
        access_log = self._access_log(options.log)
        self._request_log = (
            await asyncio.to_thread(RequestRecorder, options.request_log) if options.request_log.target else None
        )
        keys = self._keys.ring if self._keys is not None else None
        services = replace(
            services,
            request_log=self._request_log,
            keeps_results=not options.replica_port,
            http_gate=http_gate(options.http.access, keys),
            allowed_hosts=allowed_hosts(options, options.http.address, has_keys=keys is not None),
            grpc_gate=grpc_gate(options.grpc.access, keys),
            http_headers=forwarded_headers(options.http.access),
            grpc_headers=forwarded_headers(options.grpc.access),
            page_scheme=("https" if options.http.tls.active else "http") if options.http.page else "",
            metrics_port=options.metrics.port if options.metrics.enabled else 0,
            controls_models=options.models.control_mode in (ControlMode.EXPLICIT, ControlMode.AUTO),
            cors_origins=options.http.cors_origins,
            has_openai=options.http.openai,
            has_kserve_v1=options.http.kserve_v1,
            mlflow_model=options.http.mlflow_model,
            has_health_documents=options.http.kserve_v1
            or bool(options.models.files.predictor_host)
            or os.path.isdir(KSERVE_MOUNT),
            mounts=mount_sockets(options.models),
            fairness_header=options.fairness_header.lower().encode(),
        )
        if options.grpc.enabled:
            self.grpc = GrpcFrontend(engine, GrpcLimits.of(options.grpc), access_log=access_log, services=services)
            await self.grpc.start(
                options.grpc.address,
                options.grpc.port,
                ssl=self._tls(options.grpc.tls, "grpc", alpn="h2"),
                reuse_port=options.grpc.reuse_port,
                descriptors=options.grpc.descriptors,
            )
        if options.http.enabled:
            limits = options.http.limits
            self.http = HttpFrontend(engine, limits, access_log=access_log, services=services)
            await self.http.start(
                options.http.address,
                options.http.port,
                ssl=self._tls(options.http.tls, "http", alpn="http/1.1"),
                reuse_port=options.http.reuse_port,
                descriptors=options.http.descriptors,
            )
        await self._start_clouds(engine, services, access_log)
        if self._keys is not None or self._certificates:
            self._watcher = asyncio.create_task(self._watch_files())

    async def _start_clouds(self, engine: Engine, services: Services, access_log: AccessLog | None) -> None:
        options, clouds = self._options, self._options.clouds
        for is_on, port, name in (
            (clouds.sagemaker, clouds.sagemaker_port, SAGEMAKER),
            (clouds.vertex_ai, clouds.vertex_ai_port, VERTEX_AI),
        ):
            if not is_on:
                continue
            limits = options.http.limits
            end = HttpFrontend(engine, limits, access_log=access_log, services=replace(services, lend=None))
            if name == SAGEMAKER:
                folder = next((each for each in options.models.repositories if "://" not in each), "")
                end.handle = SageMaker(end.handle, end.admit, end.refusal, os.environ, folder).handle
            else:
                end.handle = VertexAi(end.handle, end.admit, os.environ, await self._predicted(engine)).handle
            await end.start(options.http.address, port, ssl=self._tls(options.http.tls, "http", alpn="http/1.1"))
            self.clouds.append(end)
            _log.info("Started %s HTTPService at %s:%d", name, options.http.address, end.port)

    async def _predicted(self, engine: Engine) -> str:
        """Return the model that Vertex AI's predictions run."""
        wanted = self._options.clouds.vertex_ai_model
        ready = {entry.name for entry in await engine.repository_index(ready_only=True)}
        if wanted and wanted not in ready:
            raise invalid(f"Expect the default model '{wanted}' is loaded")
        if not wanted and len(ready) != 1:
            raise invalid(
                "Expect the model repository contains only a single model if default model is not specified",
                hint="--vertex-ai-default-model",
            )
        return wanted or ready.pop()

    def stop_accepting(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        for front_end in self._front_ends():
            front_end.stop_accepting()

    def release_sockets(self) -> None:
        """Stop accepting connections; another process may."""
        for front_end in self._front_ends():
            front_end.release_sockets()

    async def drain_gradually(self, timeout_s: float) -> None:
        """Leave the listening sockets to another process, and serve until clients have left, up to a limit."""
        await asyncio.gather(*(front_end.drain_gradually(timeout_s) for front_end in self._front_ends()))

    async def ask_to_reconnect(self, timeout_s: float) -> None:
        """Serve as before for a while, and ask clients to leave. It takes this long where an endpoint is open."""
        await asyncio.gather(*(front_end.ask_to_reconnect(timeout_s) for front_end in self._front_ends()))

    async def collect(self, process: str = "server") -> list[Traffic]:
        """Return the traffic of the endpoints, under this name of the process."""
        named = (("http", self.http), ("grpc", self.grpc))
        return [
            Traffic(process, protocol, end.open_count, end.accepted_count, end.request_count)
            for protocol, end in named
            if end is not None
        ]

    def placement(self, runner: object) -> None:
        """Return None: everything runs in this process."""

    async def drain(self, timeout_s: float) -> bool:
        return all(await asyncio.gather(*(front_end.drain(timeout_s) for front_end in self._front_ends())))

    async def close(self) -> None:
        self.stop_accepting()
        for front_end in self._front_ends():
            await close_safely(front_end.close(), f"the endpoint on port {front_end.port}")
        self._files.close()
        if self._request_log is not None:
            await asyncio.to_thread(self._request_log.close)

    def _tls(self, tls: EndpointTls, prefix: str, *, alpn: str) -> ssl.SSLContext | None:
        if not tls.active:
            return None
        self._certificates.append(Certificate(tls, prefix, alpn=alpn))
        return self._certificates[-1].context

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for certificate in self._certificates:
                certificate.refresh()
            if self._keys is not None and self._keys.refresh():
                for front_end in self._front_ends():
                    front_end.recheck()

    def _front_ends(self) -> list[HttpFrontend | GrpcFrontend]:
        return [*(front_end for front_end in (self.http, self.grpc) if front_end is not None), *self.clouds]

    def _access_log(self, log: LogOptions) -> AccessLog | None:
        if log.access is AccessLogFormat.NONE:
            return None
        stream: LogStream = sys.stderr
        if log.access_file:
            try:
                stream = file = LogFile(log.access_file)
            except OSError as error:
                raise invalid(f"--access-log-file: cannot write '{log.access_file}': {error.strerror}") from error
            self._files.callback(file.close)
        return AccessLog(stream, as_json=log.access is AccessLogFormat.JSON)


class Certificate:
    """The TLS context of an endpoint, whose files are reloaded for new connections whenever they change."""

    def __init__(self, tls: EndpointTls, prefix: str, *, alpn: str) -> None:
        """Read the files. Raises ServingError, INVALID_ARG, when a certificate or key cannot be used."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls, self._prefix = tls, prefix
        self._seen = self._stat()
        try:
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            raise invalid(f"--{prefix}-server-cert, --{prefix}-server-key, --{prefix}-root-cert: {error}") from error
        if tls.mutual:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self.context.set_alpn_protocols([alpn])

    def refresh(self) -> None:
        """Reload the files if they have changed. A pair that cannot be used leaves the previous one."""
        seen = self._stat()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            _log.error("--%s-server-cert: the previous certificate stays in use: %s", self._prefix, error)
        else:
            _log.info("--%s-server-cert: '%s' was reloaded", self._prefix, self._tls.certificate)

    def _load(self, context: ssl.SSLContext) -> None:
        for path in filter(None, (self._tls.certificate, self._tls.key, self._tls.root)):
            os.close(os.open(path, os.O_RDONLY))  # an error of the SSL context does not name the file
        context.load_cert_chain(self._tls.certificate, self._tls.key)
        if self._tls.root:
            context.load_verify_locations(self._tls.root)

    def _stat(self) -> list[tuple[int, int, int]]:
        found = [(0, 0, 0)] * 3
        for index, path in enumerate((self._tls.certificate, self._tls.key, self._tls.root)):
            with suppress(OSError):
                status = os.stat(path)
                found[index] = status.st_mtime_ns, status.st_size, status.st_ino
        return found
