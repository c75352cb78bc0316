"""Requests of browsers: each method, route, content type, origin, `Sec-Fetch-Site` and host, and what the answer is.

Every listener of a server, and a platform, get a sample of all combinations. What a page of another site may not do
must be refused with status 403 and change nothing; everything else must not be refused. The gRPC port refuses
everything that a page can send without asking first.
"""

import http.client
import itertools
import os
import random
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

from tests.campaign.figures import Context, Figures
from tests.support.models import identity_pbtxt, write_model
from tests.support.platform_process import PlatformProcess
from tests.support.ports import free_port
from tests.support.process import ServeProcess

from charonia.client.http2 import ClientConnection, ResponseReceived
from charonia.wire.grpc_framing import prefix

FRIEND = "https://friend.example"
SAFE = ("GET", "HEAD", "OPTIONS")
METHODS = (*SAFE, "POST", "PUT", "DELETE", "PATCH")
CONTENT_TYPES = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=b",
    "application/json",
)
SITES = ("", "same-origin", "none", "same-site", "cross-site")
ORIGINS = ("", "http://{own}", "https://{own}", "http://127.0.0.1:1", "https://evil.example", "null", FRIEND)
HOSTS = ("127.0.0.1:{port}", "localhost:{port}", "evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "box")
SERVER_ROUTES = (
    *("/v2", "/v2/health/ready", "/v2/models/m", "/v2/models/m/infer", "/v2/models/m/generate", "/v2/models/m/traffic"),
    *("/v2/repository/index", "/v2/repository/models/evil/load", "/v2/repository/models/m/unload", "/openapi.json"),
    *(
        "/v2/systemsharedmemory/region/r/register",
        "/v2/systemsharedmemory/unregister",
        "/v2/cudasharedmemory/unregister",
    ),
    *("/v2/logging", "/v2/trace/setting", "/v2/models/m/trace/setting", "/samples/m", "/", "/nothing"),
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models", "/v1/models/m"),
    *("/v1/models/m:predict", "/v1/models/evil/load", "/v1/models/m/unload"),
)
SAGEMAKER_ROUTES = ("/ping", "/invocations", "/models", "/models/m", "/models/m/invoke")
GRPC_ROUTES = tuple(f"/inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "RepositoryModelLoad"))
VERTEX_AI_ROUTES = ("/predict", "/health", "/v2/models/m/infer", "/v2/repository/models/evil/load")
CLOUD = re.compile(r"Started (Sagemaker|Vertex AI) HTTPService at 127\.0\.0\.1:(\d+)")
VERTEX_AI_ENVIRONMENT = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health"}
CLOUD_ROUTES = {"Sagemaker": SAGEMAKER_ROUTES, "Vertex AI": VERTEX_AI_ROUTES}
PLATFORM_ROUTES = (
    *("/", "/login", "/login/key", "/login/sso", "/logout", "/api/v1/me", "/api/v1/keys", "/api/v1/projects"),
    *("/api/v1/projects/default/models", "/api/v1/projects/default/deployments", "/api/v1/projects/default/uploads"),
)


@dataclass(frozen=True, slots=True)
class BrowserRequest:
    """A request of a browser; "" stands for a field that it lacks."""

    method: str
    path: str
    content_type: str
    site: str
    origin: str
    host: str

    def is_refused(self, allowed: Sequence[str] = ()) -> bool:
        """Whether it has to be refused by what listens on the loopback interface, and allows these origins."""
        if "evil.example" in self.host:
            return True
        if self.method in SAFE or self.origin in allowed:
            return False
        if self.site:
            return self.site in ("same-site", "cross-site")
        return self.origin not in ("", f"http://{self.host}", f"https://{self.host}")


def requests(routes: Sequence[str], port: int, hosts: Sequence[str] = HOSTS) -> Iterator[BrowserRequest]:
    for method, path, kind, site, origin, host in itertools.product(
        METHODS, routes, CONTENT_TYPES, SITES, ORIGINS, hosts
    ):
        own = host.format(port=port)
        yield BrowserRequest(method, path, kind, site, origin.format(own=own), own)


Sample = Callable[[Iterator[BrowserRequest]], list[BrowserRequest]]


def ask(port: int, routes: Sequence[str], allowed: Sequence[str], sample: Sample) -> tuple[int, list[str]]:
    """Send a sample of requests; return how many were sent, and what was answered wrongly."""
    chosen = sample(requests(routes, port))
    wrong = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=200)
    for each in chosen:
        fields = {
            "Host": each.host,
            "Content-Type": each.content_type,
            "Origin": each.origin,
            "Sec-Fetch-Site": each.site,
        }
        body = None if each.method in SAFE else b"{}"
        connection.request(each.method, each.path, body, {name: text for name, text in fields.items() if text})
        answer = connection.getresponse()
        content = answer.read()
        is_refused = answer.status == 403 and (each.method == "HEAD" or b"are not allowed" in content)
        if is_refused != each.is_refused(allowed):
            wrong.append(f"{each}: {answer.status}")
    connection.close()
    return len(chosen), wrong


def ask_grpc(port: int, sample: Sample) -> tuple[int, list[str]]:
    """Send requests to a gRPC port, as HTTP/1.1 and as HTTP/2; the return value is as that of `ask`."""
    chosen = sample(requests(GRPC_ROUTES, port, HOSTS[:1]))
    wrong = []
    for each in chosen:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=200)
        connection.request(each.method, each.path, b"{}", {"Content-Type": each.content_type, "Origin": each.origin})
        with connection.getresponse() as answer:
            if answer.status != 505:
                wrong.append(f"HTTP/1.1, {each}: {answer.status}")
        connection.close()
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        http2 = ClientConnection()
        for each in chosen:
            fields = [(":method", each.method), (":scheme", "http"), (":path", each.path), (":authority", each.host)]
            fields += [("content-type", each.content_type), ("origin", each.origin), ("sec-fetch-site", each.site)]
            headers = [(name.encode(), text.encode()) for name, text in fields if text]
            http2.request(headers, [prefix(0)])
            answers: list[ResponseReceived] = []
            while not answers:
                sock.sendall(http2.output())
                events = http2.receive(sock.recv(65536))
                answers = [event for event in events if isinstance(event, ResponseReceived)]
            status = dict(answers[0].headers)[b":status"]
            if status not in (b"405", b"415"):
                wrong.append(f"HTTP/2, {each}: {status.decode()}")
    return 2 * len(chosen), wrong


def run(context: Context) -> Figures:
    """Ask a server in both shapes and a platform."""
    rng = random.Random(context.seed)

    def sample(made: Iterator[BrowserRequest], count: int = context.requests) -> list[BrowserRequest]:
        chosen = list(made)
        return rng.sample(chosen, min(count, len(chosen)))

    few = partial(sample, count=min(context.requests, 200))
    folder = context.folder
    write_model(folder / "models", "m", b"", config=identity_pbtxt(dims=(4,), max_batch_size=0))
    flags = (f"--cors-origins={FRIEND}", "--kserve-v1", "--model-control-mode=explicit", "--load-model=m")
    clouds = ("--allow-sagemaker=true", "--sagemaker-port=0", "--allow-vertex-ai=true", "--vertex-ai-port=0")
    replica = free_port()
    found = {}
    for name, shape in {"one process": clouds, "front ends": ("--front-ends=2", f"--replica-port={replica}")}.items():
        with patch.dict(os.environ, VERTEX_AI_ENVIRONMENT), ServeProcess(folder / "models", *flags, *shape) as server:
            ports = [int(address.rpartition(":")[2]) for address in (server.http, server.metrics, server.grpc)]
            found[name] = ask(ports[0], SERVER_ROUTES, (FRIEND,), sample)
            found[f"{name}, metrics"] = ask(ports[1], ("/metrics",), (), few)
            found[f"{name}, gRPC"] = ask_grpc(ports[2], few)
            for cloud, port in CLOUD.findall(server.log):
                found[f"{name}, {cloud}"] = ask(int(port), CLOUD_ROUTES[cloud], (FRIEND,), few)
            if shape is not clouds:
                found[f"{name}, replica"] = ask(replica, SERVER_ROUTES, (FRIEND,), few)
    with PlatformProcess(folder / "platform") as platform:
        port = int(platform.url.rpartition(":")[2])
        found["platform"] = ask(port, PLATFORM_ROUTES, (platform.url,), sample)
    figures = Figures()
    for name, (sent, wrong) in found.items():
        figures.counts[f"requests to {name}"] += sent
        for each in wrong:
            figures.found(f"{name}: {each}")
    return figures
