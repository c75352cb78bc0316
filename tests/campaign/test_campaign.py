"""The campaign itself, in short: its parts run, and each of its checks notices what is wrong."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from tests.campaign import __main__ as campaign
from tests.campaign.asking import HttpResponse, Refused, WrongAnswerError, check_grpc, check_http
from tests.campaign.figures import FINDINGS_MAX, Context, Figures
from tests.campaign.known_models import Question
from tests.campaign.role_matrix import CALLS, OTHER, OWN, Least, expected
from tritonclient.grpc import service_pb2

from charonia.core.dtypes import DataType

ASKED = Question(
    "m", {"A": (DataType.FP32, np.array([1], np.float32))}, {"B": (DataType.FP32, np.array([[0.0, 2]], np.float32))}
)
RIGHT = {"id": "7", "outputs": [{"name": "B", "datatype": "FP32", "shape": [1, 2], "data": [0.0, 2.0]}]}


@pytest.mark.parametrize(
    "parts",
    [
        ["checker, one process"],
        ["checker, front ends"],
        ["volume"],
        ["roles"],
        [f"fuzzed {n}" for n in ("HTTP", "gRPC")],
    ],
    ids=lambda parts: parts[0].replace(",", ""),
)
def test_a_short_run_finds_nothing(parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status = campaign.main(["--parts", *parts, "--requests=60", "--cases=60", "--volume=64", "--seconds=0"])

    printed = capsys.readouterr().out
    assert status == 0, printed
    assert all(part in printed for part in parts)


def test_findings_are_counted_printed_and_end_with_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def finds(context: Context) -> Figures:
        figures = Figures().counted(requests=context.requests)
        for number in range(FINDINGS_MAX + 5):
            figures.found(f"wrong answer {number}")
        return figures

    def breaks(_: Context) -> Figures:
        raise OSError("no room")

    monkeypatch.setattr(campaign, "PARTS", {"finds": finds, "breaks": breaks})

    assert campaign.main(["--parts", "finds", "--requests", "1000"]) == 1
    printed = capsys.readouterr().out
    assert f"{FINDINGS_MAX + 5}  1,000 requests" in printed
    assert "finds: wrong answer 0" in printed
    assert campaign.main(["--parts", "finds", "breaks"]) == 2
    assert "the part has failed: OSError: no room" in capsys.readouterr().out


def _other(change: Callable[[dict[str, object]], object]) -> bytes:
    found = json.loads(json.dumps(RIGHT))
    change(found)
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    "body",
    [
        _other(lambda found: found.update(id="8")),
        _other(lambda found: found["outputs"][0].update(data=[0.0, 2.5])),  # type: ignore[index]
        _other(lambda found: found["outputs"][0].update(data=[-0.0, 2.0])),  # type: ignore[index]
        _other(lambda found: found["outputs"][0].update(shape=[2, 1])),  # type: ignore[index]
        _other(lambda found: found["outputs"][0].update(name="C")),  # type: ignore[index]
        _other(lambda found: found["outputs"].append(found["outputs"][0] | {"name": "C"})),  # type: ignore[attr-defined,index]
    ],
)
def test_a_wrong_answer_is_noticed(body: bytes) -> None:
    assert check_http(ASKED, "7", HttpResponse(200, {}, _other(lambda _: None))) is None
    with pytest.raises(WrongAnswerError):
        check_http(ASKED, "7", HttpResponse(200, {}, body))


def test_an_error_needs_a_sentence() -> None:
    assert check_http(ASKED, "7", HttpResponse(400, {}, b'{"error": "no"}')) == Refused(400, "no")
    for body in (b"", b"[]", b'{"error": ""}', b"no"):
        with pytest.raises(WrongAnswerError, match="without a sentence"):
            check_http(ASKED, "7", HttpResponse(500, {}, body))


def test_a_wrong_answer_over_grpc_is_noticed() -> None:
    answer = service_pb2.ModelInferResponse(id="7")
    answer.outputs.add(name="B", datatype="FP32", shape=[1, 2])
    answer.raw_output_contents.append(np.array([0, 2], np.float32).tobytes())
    check_grpc(ASKED, "7", answer)
    with pytest.raises(WrongAnswerError):
        check_grpc(ASKED, "8", answer)
    answer.raw_output_contents[0] = np.array([0, 3], np.float32).tobytes()
    with pytest.raises(WrongAnswerError):
        check_grpc(ASKED, "7", answer)


def test_what_a_role_may_do_follows_from_the_table() -> None:
    path = "/api/v1/projects/{project}/models"
    call = CALLS[f"POST {path}"]
    found = {
        role: (expected(call, path, role, OWN), expected(call, path, role, OTHER))
        for role in (None, Least.VIEWER, Least.DEPLOYER, Least.OWNER)
    }

    assert found == {
        None: (401, 401),
        Least.VIEWER: (403, 403),
        Least.DEPLOYER: (201, 403),
        Least.OWNER: (201, 201),
    }
