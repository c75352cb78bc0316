"""How the platform reaches servers in a cluster. Pure."""

from dataclasses import dataclass

from charonia.platform.targets.kubernetes.marks import Plain

HTTP = 8000
GRPC = 8001
METRICS = 8002


@dataclass(frozen=True, slots=True)
class ServiceAddresses:
    """Addresses of services and pods of a namespace.

    Attributes:
        proxy: Address of a `kubectl proxy`, "" if the platform runs in the cluster itself.
    """

    namespace: str
    proxy: str = ""
    http_port: int = HTTP

    def http(self, name: str, workload: Plain) -> str:
        """Return the address of a deployment's HTTP endpoint, from its name and its workload."""
        if self.proxy:
            return f"{self._proxied('services', name)}:http/proxy"
        return f"http://{name}.{self.namespace}.svc:{HTTP}"

    def grpc(self, name: str) -> str:
        """Return the address of its gRPC endpoint, "" behind a `kubectl proxy`, which passes HTTP only."""
        return "" if self.proxy else f"{name}.{self.namespace}.svc:{GRPC}"

    def metrics(self, name: str) -> str:
        """Return the address of the metrics of one of its servers."""
        if self.proxy:
            return f"{self._proxied('services', name)}-headless:metrics/proxy/metrics"
        return f"http://{name}-headless.{self.namespace}.svc:{METRICS}/metrics"

    def pod_http(self, pod: Plain) -> str:
        """Return the address of a pod's HTTP endpoint, "" while it has none."""
        return self._pod(pod, self.http_port)

    def pod_metrics(self, pod: Plain) -> str:
        """Return the address of a pod's metrics, "" while it has none."""
        address = self._pod(pod, METRICS)
        return f"{address}/metrics" if address else ""

    def _pod(self, pod: Plain, port: int) -> str:
        if self.proxy:
            return f"{self._proxied('pods', pod['metadata']['name'])}:{port}/proxy"
        ip = str((pod.get("status") or {}).get("podIP", ""))
        host = f"[{ip}]" if ":" in ip else ip
        return f"http://{host}:{port}" if ip else ""

    def _proxied(self, kind: str, name: str) -> str:
        return f"{self.proxy.rstrip('/')}/api/v1/namespaces/{self.namespace}/{kind}/{name}"


@dataclass(frozen=True, slots=True)
class KserveAddresses(ServiceAddresses):
    """Addresses of InferenceServices and their pods: only HTTP, as KServe reports it."""

    http_port: int = 8080

    def http(self, name: str, workload: Plain) -> str:
        """Return the address in the status of an InferenceService, "" while it has none. See `ServiceAddresses`."""
        if self.proxy:
            return f"{self._proxied('services', name)}-predictor:80/proxy"
        return str(workload["status"]["address"]).rstrip("/")

    def grpc(self, name: str) -> str:
        """Return "": KServe exposes one port."""
        return ""

    def metrics(self, name: str) -> str:
        """Return "": only pods have metrics."""
        return ""
