"""Every route and every gRPC method is in the table of restrictable parts, once."""

from collections import Counter

from tests.support.fake_engine import FakeEngine

from charonia.server.access import rules
from charonia.server.access.rules import METHODS, ROUTES, Api, operation_of_route
from charonia.server.facade import Services
from charonia.server.grpc.methods import method_table
from charonia.server.http.frontend import HttpLimits, protocol_routes


def test_every_route_belongs_to_a_part() -> None:
    routes = {route.path for route in protocol_routes(FakeEngine(), HttpLimits(), Services(mlflow_model="m"))}

    assert {path.replace("/versions/{version}", "") for path in routes} == set(ROUTES)
    assert all(operation_of_route(path) for path in routes)


def test_every_method_belongs_to_a_part() -> None:
    assert {method.name for method in method_table().values()} == set(METHODS)


def test_nothing_belongs_to_two_parts() -> None:
    named = Counter(name for group in rules._TABLE for name in (*group.routes, *group.methods))

    assert [name for name, count in named.items() if count > 1] == []


def test_no_part_is_empty() -> None:
    assert {operation.api for operation in ROUTES.values()} == set(Api)
    assert {operation.api for operation in METHODS.values()} == set(Api)


def test_only_health_and_the_files_of_the_page_are_open_without_a_key() -> None:
    open_to_all = {name for table in (ROUTES, METHODS) for name, o in table.items() if o.scope is None}
    health = {name for table in (ROUTES, METHODS) for name, o in table.items() if o.api is Api.HEALTH}

    assert open_to_all == health | {"/", "/page.css", "/page.js"}
