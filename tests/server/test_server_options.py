import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import Code, ServingError
from charonia.server.model_options import ControlMode
from charonia.server.options import EndpointTls, GrpcOptions, HttpOptions, MetricsOptions, ModelOptions, ServerOptions
from charonia.wire.log_settings import AccessLogFormat, LogOptions


def problems(**fields: object) -> str:
    with pytest.raises(ServingError) as caught:
        ServerOptions(**fields)  # type: ignore[arg-type]  # each test gives what its field takes
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


def test_the_defaults_are_tritons() -> None:
    options = ServerOptions()

    assert (options.http.port, options.grpc.port, options.metrics.port) == (8000, 8001, 8002)
    assert options.id == "triton"
    assert options.models.control_mode is ControlMode.NONE
    assert options.http.limits.body_bytes_max == 67108864


def test_a_file_of_an_access_log_needs_one() -> None:
    message = problems(log=LogOptions(access_file="access.log"))

    assert message.startswith("--access-log-file: expected --access-log=text or --access-log=json")
    ServerOptions(log=LogOptions(access=AccessLogFormat.JSON, access_file="access.log"))


def test_models_to_load_need_explicit_mode() -> None:
    message = problems(models=ModelOptions(load=("bert",)))

    assert message == "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."


def test_the_wildcard_stands_alone() -> None:
    explicit = ControlMode.EXPLICIT

    message = problems(models=ModelOptions(control_mode=explicit, load=("*", "bert")))

    assert message == "Wildcard model name '*' must be the ONLY startup model if specified at all."
    assert ServerOptions(models=ModelOptions(control_mode=explicit, load=("*", "*"))).models.load == ("*", "*")


def test_the_repositories_are_polled_in_mode_poll_only() -> None:
    assert ModelOptions(poll_secs=5).poll_interval_secs == 0
    assert ModelOptions(poll_secs=5, control_mode=ControlMode.POLL).poll_interval_secs == 5
    assert "at least 1" in problems(models=ModelOptions(poll_secs=0, control_mode=ControlMode.POLL))


@pytest.mark.parametrize("name", ["../other", "a/b", ".."])
def test_a_configuration_variant_is_a_name_and_no_path(name: str) -> None:
    assert "expected a name without '/'" in problems(models=ModelOptions(config_name=name))


def test_tls_needs_a_certificate_and_a_key_and_for_clients_a_root() -> None:
    assert problems(http=HttpOptions(tls=EndpointTls(enabled=True))).splitlines() == [
        "--http-use-ssl needs --http-server-cert",
        "--http-use-ssl needs --http-server-key",
    ]
    assert problems(grpc=GrpcOptions(tls=EndpointTls(mutual=True, certificate="c", key="k"))) == (
        "--grpc-use-ssl-mutual needs --grpc-root-cert, to check the certificates of clients"
    )
    complete = EndpointTls(mutual=True, certificate="c", key="k", root="r")
    assert ServerOptions(grpc=GrpcOptions(tls=complete)).grpc.tls.active


def test_two_endpoints_on_one_port_are_refused() -> None:
    assert problems(http=HttpOptions(port=9000), grpc=GrpcOptions(port=9000)) == (
        "--grpc-port: port 9000 is already that of --http-port"
    )
    assert problems(metrics=MetricsOptions(port=8001)) == "--metrics-port: port 8001 is already that of --grpc-port"


def test_one_port_on_two_addresses_a_free_port_and_an_endpoint_that_is_off_collide_with_nothing() -> None:
    apart = ServerOptions(http=HttpOptions(address="127.0.0.1"), metrics=MetricsOptions(address="127.0.0.2", port=8000))
    free = ServerOptions(http=HttpOptions(port=0), grpc=GrpcOptions(port=0), metrics=MetricsOptions(port=0))
    off = ServerOptions(http=HttpOptions(enabled=False, port=8001))

    assert apart.http.port == apart.metrics.port == 8000
    assert (free.http.port, free.grpc.port, free.metrics.port) == (0, 0, 0)
    assert off.http.port == off.grpc.port == 8001


def test_metrics_listen_where_http_does_unless_told() -> None:
    http = HttpOptions(address="127.0.0.1")

    assert ServerOptions(http=http).metrics_address == "127.0.0.1"
    assert ServerOptions(http=http, metrics=MetricsOptions(address="::1")).metrics_address == "::1"


def test_all_problems_are_reported_together() -> None:
    message = problems(
        models=ModelOptions(load=("*", "a")),
        http=HttpOptions(port=8001, tls=EndpointTls(enabled=True, key="k")),
    )

    assert len(message.splitlines()) == 4


def test_what_the_guard_does_needs_a_guard() -> None:
    assert problems(replica_port=9000) == "--replica-port: expected --front-ends=1 or more, too"
    assert problems(front_ends=1, beside=4711) == "--beside: expected --replica-port, too"
    assert problems(front_ends=1, replica_port=8001).startswith("--replica-port: port 8001 is already that of --grpc")
    assert problems(front_ends=1, replica_port=9000, http=HttpOptions(enabled=False)).startswith("--replica-port:")
    ServerOptions(front_ends=1, replica_port=9000, beside=4711, memory_limit_mib=100)


PORTS = st.integers(0, 3)
ADDRESSES = st.sampled_from(["0.0.0.0", "::", "127.0.0.1", "10.0.0.1"])


@given(ports=st.tuples(PORTS, PORTS), addresses=st.tuples(ADDRESSES, ADDRESSES))
def test_a_collision_is_found_whichever_endpoint_comes_first(
    ports: tuple[int, int], addresses: tuple[str, str]
) -> None:
    def collide(first: int, second: int) -> bool:
        try:
            ServerOptions(
                http=HttpOptions(address=addresses[first], port=ports[first]),
                grpc=GrpcOptions(address=addresses[second], port=ports[second]),
                metrics=MetricsOptions(enabled=False),
            )
        except ServingError:
            return True
        return False

    assert collide(0, 1) == collide(1, 0)
