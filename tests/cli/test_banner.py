import io
from dataclasses import dataclass, field, replace

import pytest

from charonia.cli.serve import banner, models_table, signature
from charonia.cli.terminal import Style, is_terminal
from charonia.config.model import ModelConfig, ModelInput, ModelOutput, ModelWarmup, TransactionPolicy, WarmupInput
from charonia.config.parameters import EXAMPLE_REFUSED
from charonia.core.dtypes import DataType
from charonia.core.errors import not_found
from charonia.core.metadata import ModelIndexEntry, ModelState
from charonia.server.options import EndpointTls, HttpOptions, MetricsOptions, ServerOptions

LOCAL = ServerOptions(http=HttpOptions(address="127.0.0.1"), metrics=MetricsOptions(port=9002))
BERT = ModelConfig(
    name="bert",
    max_batch_size=4,
    input=(ModelInput("x", DataType.FP32, dims=(2,)), ModelInput("y", DataType.BYTES, dims=(1,), optional=True)),
    output=(ModelOutput("z", DataType.INT64, dims=(-1,)),),
)


@dataclass
class Endpoint:
    port: int


@dataclass
class Started:
    configs: list[ModelConfig]
    http: Endpoint | None = field(default_factory=lambda: Endpoint(9000))
    grpc: Endpoint | None = field(default_factory=lambda: Endpoint(9001))
    metrics: Endpoint | None = field(default_factory=lambda: Endpoint(9002))

    def models(self) -> list[ModelIndexEntry]:
        return [ModelIndexEntry("failed", "1", ModelState.UNAVAILABLE, "no such file")]

    def model_config(self, name: str) -> ModelConfig:
        for config in self.configs:
            if config.name == name:
                return config
        raise not_found(f"model '{name}' is not found")


def printed(*configs: ModelConfig, options: ServerOptions = LOCAL) -> str:
    return banner(options, Started(list(configs)), [each.name for each in configs], Style(has_colours=False))


def test_what_matters_comes_first() -> None:
    assert printed(BERT).splitlines() == [
        "",
        "  bert: x FP32[-1,2], y? BYTES[-1,1] -> z INT64[-1,-1]",
        "",
        "  Open http://localhost:9000/",
        "",
        "    charonia infer bert -u localhost:9000 -i 'x=[[0.5,0.5]]'",
        """    curl http://localhost:9000/v2/models/bert/generate -d '{"x":[0.5,0.5]}'""",
        "",
        "  gRPC localhost:9001, metrics http://localhost:9002/metrics, "
        "this machine only (--host=0.0.0.0 for others, too)",
    ]


def test_several_models_have_one_request_and_the_page() -> None:
    text = printed(BERT, replace(BERT, name="gpt"))

    assert text.count("curl") == 2  # one of them in the line on the page
    assert "  gpt: x FP32" in text
    assert "The page has a request for each model" in text


def test_a_long_request_is_left_to_the_command_that_makes_inputs_up() -> None:
    given = ModelInput("x", DataType.FP32, dims=(30,))

    text = printed(ModelConfig("net", input=(given,), output=BERT.output))

    assert "    charonia infer net -u localhost:9000\n" in text
    assert "curl" not in text


def test_a_language_model_has_a_chat_and_a_base_url() -> None:
    text = printed(
        ModelConfig(
            "smol",
            input=(ModelInput("text_input", DataType.BYTES, dims=(1,)),),
            output=(ModelOutput("text_output", DataType.BYTES, dims=(1,)),),
        )
    )

    assert "    charonia chat smol -u localhost:9000\n" in text
    assert "    Base URL for clients of OpenAI's API: http://localhost:9000/v1\n" in text
    assert 'OpenAI(base_url="http://localhost:9000/v1"' in text


def test_a_model_that_failed_is_in_the_table_of_all() -> None:
    text = banner(LOCAL, Started([BERT]), ["bert", "failed"], Style(has_colours=False))

    assert "UNAVAILABLE: no such file" in text
    assert "  bert: x FP32" in text


@pytest.mark.parametrize(
    ("http", "url", "reach"),
    [
        (HttpOptions(address="10.0.0.1"), "http://10.0.0.1:9000/", ""),
        (HttpOptions(address="0.0.0.0"), "http://localhost:9000/", "reachable from other machines"),
        (HttpOptions(address="::1"), "http://[::1]:9000/", ""),
        (HttpOptions(tls=EndpointTls(enabled=True, certificate="c", key="k")), "https://localhost:9000/", ""),
    ],
)
def test_requests_name_the_address_that_the_server_listens_on(http: HttpOptions, url: str, reach: str) -> None:
    text = printed(BERT, options=ServerOptions(http=http))

    assert f"  Open {url}\n" in text
    assert f"curl {url}" in text.replace("curl '", "curl ")
    assert reach in text


def test_the_command_for_a_picture_says_how_to_send_one() -> None:
    dims = {"pixels": (3, -1, -1), "bytes": (-1, -1, 3), "spectrum": (2, 80, 100), "row": (3,)}
    inputs = tuple(ModelInput(name, DataType.FP32, dims=each) for name, each in dims.items())

    text = printed(ModelConfig(name="net", max_batch_size=4, input=inputs))

    assert "    # or -i pixels=@cat.jpg\n" in text
    assert text.count("cat.jpg") == 1


def test_a_picture_is_not_proposed_to_a_model_that_takes_only_some_sizes() -> None:
    sample = ModelWarmup("example", 0, {"x": WarmupInput(DataType.FP32, (3, 48, 48), zero_data=True)})
    given = ModelInput("x", DataType.FP32, dims=(3, -1, -1))

    text = printed(ModelConfig("net", max_batch_size=4, input=(given,), model_warmup=(sample,)))

    assert "    charonia infer net -u localhost:9000\n" in text


def test_a_model_that_refuses_what_is_made_up_gets_a_command_for_own_arrays() -> None:
    inputs = tuple(ModelInput(name, DataType.FP32, dims=(-1,)) for name in ("x:0", "y"))
    refusal = {EXAMPLE_REFUSED: "x:0 has another size"}

    text = printed(ModelConfig("net", max_batch_size=4, input=inputs, parameters=refusal))

    assert "    Generated inputs do not work here. The model answered: x:0 has another size\n" in text
    assert "\n    charonia infer net -u localhost:9000 -i x:0=@x_0.npy -i y=@y.npy\n" in text
    assert "curl" not in text


def test_a_stream_has_an_arrow_of_its_own() -> None:
    config = ModelConfig(
        output=(ModelOutput("z", DataType.BYTES, dims=(1,)),),
        model_transaction_policy=TransactionPolicy(decoupled=True),
    )

    assert signature(config) == " ->> z BYTES[1]"


def test_the_table_says_what_is_wrong_with_a_model_once() -> None:
    fault = "no such file\n  at all"
    inner = f"Model 'net' loading failed with error: {fault};"
    entries = [
        ModelIndexEntry("net", "1", ModelState.UNAVAILABLE, fault),
        ModelIndexEntry("inner", "1", ModelState.UNAVAILABLE, inner),
        ModelIndexEntry("outer", "1", ModelState.UNAVAILABLE, f"Model 'inner' loading failed with error: {inner};"),
    ]

    assert models_table(entries).splitlines()[2:] == [
        "net    1        UNAVAILABLE: no such file",
        "                  at all",
        "inner  1        UNAVAILABLE: Model 'net' loading failed with error: see 'net';",
        "outer  1        UNAVAILABLE: Model 'inner' loading failed with error: see 'inner';",
    ]


def test_a_terminal_without_cursor_control_counts_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    found = {}
    for name in ("xterm", "dumb", ""):
        monkeypatch.setenv("TERM", name)
        found[name] = is_terminal(Terminal())

    assert found == {"xterm": True, "dumb": False, "": False}
