"""Clients that are generated from the OpenAPI document of a server: their types compile, and they call functions."""

import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.process import ServeProcess

TOOLS = Path(os.environ.get("CHARONIA_TYPESCRIPT_TOOLS", "absent"))

SERVICE = """
import datetime

import charonia
from pydantic import BaseModel, Field

class Item(BaseModel):
    name: str
    count: int = Field(1, ge=1)

class Order(BaseModel):
    items: list[Item]
    when: datetime.date

@charonia.model
def total(orders: list[Order], note: str | None = None) -> dict:
    return {"total": sum(item.count for order in orders for item in order.items), "note": note}

@charonia.model
def order(order: Order) -> Order:  # the same types a second time
    return order

@charonia.model(max_batch_size=4)
def double(x: list[list[float]]) -> list[list[float]]:
    return [[2 * value for value in row] for row in x]
"""

PROGRAM = """
import datetime, sys

import charonia_client.models as m
from charonia_client import Client
from charonia_client.api.double import generatedouble
from charonia_client.api.order import generateorder
from charonia_client.api.total import generatetotal

client = Client(sys.argv[1], raise_on_unexpected_status=True)
order = m.TotalOrder(items=[m.TotalItem(name="pen", count=2)], when=datetime.date(2024, 2, 3))
print(generatetotal.sync(client=client, body=m.GeneratetotalBody(orders=[order])).output.to_dict())
body = m.GenerateorderBody(items=[m.OrderItem(name="pen")], when=datetime.date(2024, 2, 3))
print(generateorder.sync(client=client, body=body).when)
print(generatedouble.sync(client=client, body=m.GeneratedoubleBody(x=[[1.5, 2.0], [3.0, 4.0]])).output)
"""

TYPESCRIPT = """
import createClient from "openapi-fetch";
import type { paths } from "./api.mjs";

declare const process: { argv: string[] };

const client = createClient<paths>({ baseUrl: process.argv[2] });
const order = { items: [{ name: "pen", count: 2 }], when: "2024-02-03" };
const total = await client.POST("/v2/models/total/generate", { body: { orders: [order], note: null } });
const double = await client.POST("/v2/models/double/generate", { body: { x: [[1.5, 2], [3, 4]] } });
console.log(JSON.stringify([total.data?.output, double.data?.output]));
if (order.items.length > 1) {
  // @ts-expect-error: a text is no order
  await client.POST("/v2/models/total/generate", { body: { orders: ["pen"] } });
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    path = tmp_path_factory.mktemp("service") / "service.py"
    path.write_text(SERVICE)
    with ServeProcess(path) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    with urllib.request.urlopen(f"http://{server.http}/openapi.json") as answer:
        path.write_bytes(answer.read())
    return path


def run(*command: str | Path, folder: Path) -> str:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": beside}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_python_client_is_generated_whole_and_calls_functions(
    server: ServeProcess, document: Path, tmp_path: Path
) -> None:
    pytest.importorskip("openapi_python_client", reason="the generator is a package of the extra `test`")

    said = run(Path(sys.executable).with_name("openapi-python-client"), "generate", "--path", document, folder=tmp_path)
    assert "Warning" not in said
    (tmp_path / "charonia-client" / "use.py").write_text(PROGRAM)
    printed = run(sys.executable, "use.py", f"http://{server.http}", folder=tmp_path / "charonia-client")

    assert printed.splitlines() == ["{'total': 2, 'note': None}", "2024-02-03", "[[3.0, 4.0], [6.0, 8.0]]"]


@pytest.mark.skipif(not TOOLS.is_dir(), reason="CHARONIA_TYPESCRIPT_TOOLS names no folder with openapi-typescript")
def test_a_typescript_client_compiles_and_calls_functions(server: ServeProcess, document: Path, tmp_path: Path) -> None:
    modules = TOOLS / "node_modules"
    (tmp_path / "node_modules").symlink_to(modules)
    run(modules / ".bin" / "openapi-typescript", document, "-o", "api.d.mts", folder=tmp_path)
    (tmp_path / "use.mts").write_text(TYPESCRIPT)

    strict = ("--strict", "--module", "nodenext", "--moduleResolution", "nodenext", "--target", "es2022")
    run(modules / ".bin" / "tsc", *strict, "use.mts", folder=tmp_path)
    node = shutil.which("node")
    assert node is not None
    printed = run(node, "use.mjs", f"http://{server.http}", folder=tmp_path)

    assert printed.strip() == '[{"total":2,"note":null},[[3,4],[6,8]]]'
