import asyncio
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support import torch_models
from tests.support.backends import CPU, Specs, ask, assert_close, load, request, request_of, version_of
from tests.support.backends import complete as complete_by
from tests.support.backends import config_of as config_by
from torch import nn

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput, Reshape
from charonia.config.pbtxt import parse
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Array
from charonia.server.backends.api import BackendSettings, Completion, Execution, Placement
from charonia.server.backends.pytorch.backend import PyTorchBackend, PyTorchModel
from charonia.server.backends.pytorch.instance import PyTorchInstance
from charonia.testing.backend_suite import arrays

FP32, INT64, BYTES, BF16 = DataType.FP32, DataType.INT64, DataType.BYTES, DataType.BF16


def config_of(sides: tuple[Specs, Specs], max_batch_size: int = 8, **more: Any) -> ModelConfig:
    return config_by(*sides, max_batch_size, count=2, backend="pytorch", **more)


PERCEPTRON: tuple[Specs, Specs] = ({"x": (FP32, (16,))}, {"y": (FP32, (4,))})


async def loaded(folder: Path, config: ModelConfig, count: int = 1) -> tuple[PyTorchModel, list[PyTorchInstance]]:
    model = await PyTorchBackend().load(version_of(folder), config, BackendSettings())
    return model, [await model.create_instance(CPU) for _ in range(count)]


def make(folder: Path, config: ModelConfig, place: Placement = CPU) -> PyTorchInstance:
    instance: PyTorchInstance = load(PyTorchBackend, version_of(folder), config, place=place)
    return instance


def complete(folder: Path, config: ModelConfig | None = None) -> Completion:
    return complete_by(PyTorchBackend, version_of(folder), config)


def values(execution: Execution, index: int = 0) -> dict[str, Array]:
    return arrays(execution.results[index])


def refusal(folder: Path, config: ModelConfig) -> ServingError:
    with pytest.raises(ServingError) as caught:
        make(folder, config)
    return caught.value


def ones(size: int = 1, width: int = 16, name: str = "x") -> InferRequest:
    return request({name: (FP32, np.ones((size, width), np.float32))})


def expected(size: int = 1) -> Array:
    with torch.inference_mode():
        result: Array = torch_models.Perceptron()(torch.ones(size, 16)).numpy()
    return result


@pytest.fixture
def scripted(tmp_path: Path) -> Path:
    torch_models.save_scripted(torch_models.Perceptron(), tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def eager(tmp_path: Path) -> Path:
    torch_models.eager_perceptron(tmp_path / "m")
    return tmp_path / "m"


class Text(nn.Module):
    def forward(self, texts: list[str], x: torch.Tensor) -> tuple[list[str], torch.Tensor]:
        return [text + "!" for text in texts], x * 2


class Dictionary(nn.Module):
    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": inputs["a"] + inputs["b"], "difference": inputs["a"] - inputs["b"]}


class Kinds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Rated(nn.Module):
    def forward(self, x: torch.Tensor, sr: int) -> torch.Tensor:
        if sr != 16000:
            raise ValueError("expected 16000")
        return x.reshape(1, 256, 2).sum(2)


class Picture(nn.Module):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x.permute(0, 2, 3, 1)[..., 0] * scale


class Counting(nn.Module):
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum()
        return self.total


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return x


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


class TestFormats:
    def test_texts_go_in_and_out_as_lists_of_strings(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Text(), tmp_path / "m")
        config = config_of(
            ({"texts": (BYTES, (1,)), "x": (FP32, (1,))}, {"out__0": (BYTES, (1,)), "out__1": (FP32, (1,))})
        )
        instance = make(tmp_path / "m", config)
        texts = np.array([["h\u00e9".encode()], [b"b"]], object)

        answer = instance.execute([request({"texts": (BYTES, texts), "x": (FP32, np.ones((2, 1), np.float32))})] * 2)

        assert values(answer, 1)["out__0"].tolist() == [["h\u00e9!".encode()], [b"b!"]]
        assert values(answer, 1)["out__1"].tolist() == [[2.0], [2.0]]

    def test_strings_of_a_model_that_does_not_batch_are_one_dimension(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Text(), tmp_path / "m")
        config = config_of(({"texts": (BYTES, (-1,)), "x": (FP32, (1,))}, {"RESULT[0]": (BYTES, (-1,))}), 0)
        texts = np.array([b"a", b"b", b"c"], object)

        answer = make(tmp_path / "m", config).execute(
            [request({"texts": (BYTES, texts), "x": (FP32, np.ones(1, np.float32))})]
        )

        assert values(answer)["RESULT[0]"].tolist() == [b"a!", b"b!", b"c!"]

    def test_a_dictionary_goes_in_and_out_by_its_keys(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Dictionary(), tmp_path / "m")
        config = config_of(({"b": (FP32, (2,)), "a": (FP32, (2,))}, {"difference": (FP32, (2,)), "sum": (FP32, (2,))}))
        a, b = np.full((1, 2), 5, np.float32), np.full((1, 2), 3, np.float32)

        answer = ask(make(tmp_path / "m", config), request_of(a=a, b=b))

        assert answer["sum"].tolist() == [[8, 8]]
        assert answer["difference"].tolist() == [[2, 2]]

    def test_arguments_of_an_exported_program_may_be_nested(self, tmp_path: Path) -> None:
        batch = torch.export.Dim("batch")
        program = torch.export.export(
            torch_models.Nested(),
            (torch.zeros(2, 4), {"bias": torch.zeros(2, 1)}),
            {"scale": torch.zeros(2, 1)},
            dynamic_shapes={"x": {0: batch}, "options": {"bias": {0: batch}}, "scale": {0: batch}},
        )
        torch.export.save(program, torch_models.folder_of(tmp_path / "m") / "model.pt2")
        config = config_of(
            (
                {"ARGS[0]": (FP32, (4,)), "ARGS[1][bias]": (FP32, (1,)), "KWARGS[scale]": (FP32, (1,))},
                {"RESULT[sum]": (FP32, (4,)), "RESULT[parts][1]": (FP32, (1,))},
            )
        )
        one = np.ones((1, 1), np.float32)
        sent = request(
            {
                "ARGS[0]": (FP32, np.ones((1, 4), np.float32)),
                "ARGS[1][bias]": (FP32, one),
                "KWARGS[scale]": (FP32, 2 * one),
            }
        )

        answer = values(make(tmp_path / "m", config).execute([sent, sent]), 1)

        assert answer["RESULT[sum]"].tolist() == [[3, 3, 3, 3]]
        assert answer["RESULT[parts][1]"].tolist() == [[1]]

    @pytest.mark.parametrize("datatype", [d for d in DataType if d is not BYTES])
    def test_tensors_of_every_datatype_pass(self, tmp_path: Path, datatype: DataType) -> None:
        torch_models.save_scripted(Kinds(), tmp_path / "m")
        instance = make(tmp_path / "m", config_of(({"x": (datatype, (2,))}, {"y": (datatype, (2,))})))
        array = np.array([[0, 1]]).astype(datatype.numpy)

        answer = ask(instance, request({"x": (datatype, array)}))["y"]

        assert answer.dtype == datatype.numpy
        np.testing.assert_array_equal(answer, array)

    def test_reshape_is_applied_on_the_way_in_and_out(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Kinds(), tmp_path / "m")
        config = ModelConfig(
            name="m",
            max_batch_size=4,
            input=(ModelInput("x", FP32, dims=(1,), reshape=Reshape(())),),
            output=(ModelOutput("y", FP32, (1,), reshape=Reshape(())),),
        )

        answer = ask(make(tmp_path / "m", config), ones(3, 1))["y"]

        assert answer.tolist() == [[1.0], [1.0], [1.0]]

    def test_weights_of_a_module_in_python_may_be_safetensors(self, eager: Path) -> None:
        (eager / "1" / "model.pt").unlink()
        save_file(torch_models.Perceptron().state_dict(), eager / "1" / "model.safetensors")

        answer = make(eager, config_of(PERCEPTRON, runtime="model.py")).execute([ones()])

        assert_close(values(answer)["y"], expected())

    def test_two_modules_in_python_may_have_helpers_of_the_same_name(self, tmp_path: Path) -> None:
        instances = []
        for number in (1, 2):
            folder = torch_models.folder_of(tmp_path / f"m{number}")
            (folder / "helper.py").write_text(f"FACTOR = {number}\n", encoding="utf-8")
            (folder / "model.py").write_text(
                "import torch\nfrom helper import FACTOR\n"
                "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x * FACTOR\n",
                encoding="utf-8",
            )
            config = config_of(({"x": (FP32, (1,))}, {"y": (FP32, (1,))}), runtime="model.py")
            instances.append(make(tmp_path / f"m{number}", config))

        answers = [ask(instance, ones(1, 1))["y"].tolist() for instance in instances]

        assert answers == [[[1.0]], [[2.0]]]

    def test_a_model_in_a_file_of_another_name_is_found(self, scripted: Path) -> None:
        (scripted / "1" / "model.pt").rename(scripted / "1" / "net.pt")
        config = replace(config_of(PERCEPTRON), default_model_filename="net.pt")

        assert_close(ask(make(scripted, config), ones())["y"], expected())


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor


class TestNumbers:
    def test_a_number_is_an_input_of_one_element(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Scaled(), tmp_path / "m")
        config = config_of(({"x": (FP32, (-1,)), "factor": (INT64, (-1,))}, {"y": (FP32, (-1,))}), 0)
        instance = make(tmp_path / "m", config)
        x = np.ones(2, np.float32)

        answer = instance.execute([request_of(x=x, factor=np.array([3]))])

        assert values(answer)["y"].tolist() == [3, 3]
        with pytest.raises(ServingError, match="takes one number"):
            instance.execute([request_of(x=x, factor=np.array([3, 4]))])

    def test_a_batch_has_no_number_of_its_own(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Scaled(), tmp_path / "m")
        config = config_of(({"IN__0": (FP32, (1,)), "IN__1": (INT64, (1,))}, {"y": (FP32, (1,))}))

        assert "requests of a batch cannot share" in refusal(tmp_path / "m", config).message


class TestAnswers:
    def test_only_outputs_that_somebody_asked_for_are_sent(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Dictionary(), tmp_path / "m")
        config = config_of(({"a": (FP32, (2,)), "b": (FP32, (2,))}, {"sum": (FP32, (2,)), "difference": (FP32, (2,))}))
        array = np.ones((1, 2), np.float32)

        answer = ask(make(tmp_path / "m", config), request({"a": (FP32, array), "b": (FP32, array)}, "difference"))

        assert answer.keys() == {"difference"}

    def test_a_weight_that_the_model_returns_is_copied(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Counting(), tmp_path / "m")
        instance = make(tmp_path / "m", config_of(({"x": (FP32, (1,))}, {"y": (FP32, (4,))})))

        first = ask(instance, ones(1, 1))["y"]
        instance.execute([ones(1, 1)])

        assert first.tolist() == [[1, 1, 1, 1]]

    def test_what_is_not_a_number_passes_untouched(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Root(), tmp_path / "m")
        instance = make(tmp_path / "m", config_of(({"x": (FP32, (3,))}, {"y": (FP32, (3,))})))

        answer = values(instance.execute([request_of(x=np.array([[-1, 0, np.nan]], np.float32))]))["y"]

        assert np.isnan(answer[0, 0])
        assert answer[0, 1] == -np.inf
        assert np.isnan(answer[0, 2])

    def test_an_output_of_another_datatype_than_configured_is_an_error_with_both(self, scripted: Path) -> None:
        instance = make(scripted, config_of((PERCEPTRON[0], {"y": (INT64, (4,))})))

        with pytest.raises(ServingError, match="expects datatype TYPE_INT64, model provides TYPE_FP32"):
            instance.execute([ones()])

    def test_an_error_of_the_model_is_one_sentence(self, tmp_path: Path) -> None:
        torch_models.save_scripted(torch_models.Perceptron(), tmp_path / "m")
        instance = make(tmp_path / "m", config_of(({"x": (FP32, (-1,))}, PERCEPTRON[1])))

        with pytest.raises(ServingError) as caught:
            instance.execute([ones(1, 5)])

        assert caught.value.code is Code.INTERNAL
        assert "mat1 and mat2 shapes cannot be multiplied (1x5 and 16x32)" in caught.value.message
        assert "\n" not in caught.value.message
        assert "Traceback" not in caught.value.message

    def test_out_of_memory_fails_the_batch_and_the_next_one_is_answered(
        self, scripted: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        instance = make(scripted, config_of(PERCEPTRON))
        calls = []

        def full(*arguments: object) -> None:
            calls.append(arguments)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        with monkeypatch.context() as patched:
            patched.setattr(instance, "_run", full)
            with pytest.raises(ServingError) as caught:
                instance.execute([ones(), ones()])

        assert caught.value.code is Code.UNAVAILABLE
        assert "out of memory" in caught.value.message
        assert len(calls) == 1
        assert ask(instance, ones())["y"].shape == (1, 4)

    def test_after_its_device_was_lost_an_instance_says_so_and_the_model_is_not_ready(
        self, scripted: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, [instance, other] = asyncio.run(loaded(scripted, config_of(PERCEPTRON), 2))

        def lost(*arguments: object) -> None:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

        assert asyncio.run(model.is_ready())
        with monkeypatch.context() as patched:
            patched.setattr(instance, "_run", lost)
            with pytest.raises(ServingError, match="the GPU failed"):
                instance.execute([ones(), ones()])

        with pytest.raises(ServingError, match="cannot run") as caught:
            instance.execute([ones()])
        assert caught.value.code is Code.UNAVAILABLE
        assert not asyncio.run(model.is_ready())
        assert ask(other, ones())["y"].shape == (1, 4)


class TestOptions:
    def test_each_instance_has_its_own_weights_and_memory_shows_them(self, scripted: Path) -> None:
        model, _ = asyncio.run(loaded(scripted, config_of(PERCEPTRON), 2))

        size = 4 * (16 * 32 + 32 + 32 * 4 + 4)
        assert [(usage.type, usage.byte_size) for usage in model.memory()] == [("CPU", size)] * 2

    def test_a_model_that_chooses_its_devices_itself_gets_arrays_of_the_cpu(self, scripted: Path) -> None:
        instance = make(scripted, config_of(PERCEPTRON), Placement("m_0", InstanceKind.KIND_MODEL))

        assert_close(ask(instance, ones(2))["y"], expected(2))

    def test_shared_weights_are_there_once(self, scripted: Path) -> None:
        model, instances = asyncio.run(
            loaded(scripted, config_of(PERCEPTRON, parameters={"ENABLE_WEIGHT_SHARING": "true"}), 2)
        )

        assert len(model.memory()) == 1
        for instance in instances:
            assert_close(ask(instance, ones(2))["y"], expected(2))

    def test_weights_of_a_model_with_state_are_not_shared(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Attribute(), tmp_path / "m")

        error = refusal(
            tmp_path / "m",
            config_of(({"x": (FP32, (1,))}, {"y": (FP32, (1,))}), parameters={"ENABLE_WEIGHT_SHARING": "true"}),
        )

        assert "changes its attribute 'last'" in error.message

    @pytest.mark.parametrize(
        "parameters",
        [
            {"INFERENCE_MODE": "false"},
            {"DISABLE_OPTIMIZED_EXECUTION": "true"},
            {"ENABLE_CACHE_CLEANING": "true"},
            {"INTRA_OP_THREAD_COUNT": "2"},
            {"CHANNELS_LAST": "true"},
        ],
    )
    def test_an_option_of_speed_changes_no_answer(self, scripted: Path, parameters: dict[str, str]) -> None:
        answer = make(scripted, config_of(PERCEPTRON, parameters=parameters)).execute([ones(3)])

        assert_close(values(answer)["y"], expected(3))

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_lower_precision_converts_weights_inputs_and_outputs(self, scripted: Path, precision: str) -> None:
        model, [instance] = asyncio.run(loaded(scripted, config_of(PERCEPTRON, parameters={"PRECISION": precision})))

        answer = ask(instance, ones())["y"]

        assert answer.dtype == np.float32
        assert_close(answer, expected(), 0.02)
        assert model.memory()[0].byte_size == 2 * (16 * 32 + 32 + 32 * 4 + 4)

    def test_a_module_is_compiled_before_it_is_ready(self, eager: Path) -> None:
        parameters = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager", "fullgraph": true}'}
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]

        instance = make(eager, config_of(PERCEPTRON, runtime="model.py", parameters=parameters))

        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert compiled > before
        assert_close(ask(instance, ones(5))["y"], expected(5))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled

    def test_a_module_that_cannot_be_compiled_is_refused(self, tmp_path: Path) -> None:
        (torch_models.folder_of(tmp_path / "m") / "model.py").write_text(
            "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
            "        torch._dynamo.graph_break()\n        return x\n",
            encoding="utf-8",
        )
        parameters = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager", "fullgraph": true}'}

        error = refusal(
            tmp_path / "m",
            config_of(({"x": (FP32, (1,))}, {"y": (FP32, (1,))}), runtime="model.py", parameters=parameters),
        )

        assert error.message.startswith("torch.compile")

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}"}, "which torch.compile does not take"),
            ({"MODULE_CLASS": "Net"}, "is for runtime 'model.py' only"),
            ({"PRECISION": "int4"}, "expected one of fp32, bf16, fp16"),
        ],
    )
    def test_an_option_that_does_not_fit_torchscript_is_refused(
        self, scripted: Path, parameters: dict[str, str], message: str
    ) -> None:
        assert message in refusal(scripted, config_of(PERCEPTRON, parameters=parameters)).message

    def test_an_exported_program_keeps_its_precision(self, tmp_path: Path) -> None:
        torch_models.exported_perceptron(tmp_path / "m")

        assert "PRECISION" in refusal(tmp_path / "m", config_of(PERCEPTRON, parameters={"PRECISION": "bf16"})).message


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemError('code of the file was run')",)


class TestRefusals:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "the file is empty"),
            (b"hello", "not a zip archive, but begins with b'hello'"),
            (b"PK\x03\x04 and more", "begins with the start of one: the file is incomplete"),
            (pickle.dumps({}), "a pickle"),
            (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        ],
    )
    def test_a_file_of_another_kind_is_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        (torch_models.folder_of(tmp_path / "m") / "model.pt").write_bytes(content)

        assert message in str(refusal(tmp_path / "m", config_of(PERCEPTRON)))

    def test_an_archive_of_something_else_is_named(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(torch_models.folder_of(tmp_path / "m") / "model.pt", "w") as archive:
            archive.writestr("readme.txt", "hello")

        assert "a zip archive of readme.txt" in refusal(tmp_path / "m", config_of(PERCEPTRON)).message

    def test_a_checkpoint_without_its_code_is_refused_with_what_to_do(self, tmp_path: Path) -> None:
        torch.save(torch_models.Perceptron().state_dict(), torch_models.folder_of(tmp_path / "m") / "model.pt")

        error = refusal(tmp_path / "m", config_of(PERCEPTRON))

        assert "does not hold the model's code" in error.message
        assert "runtime: 'model.py'" in error.hint

    def test_a_missing_file_is_named_with_those_that_are_there(self, tmp_path: Path) -> None:
        (torch_models.folder_of(tmp_path / "m") / "net.bin").write_bytes(b"")

        error = refusal(tmp_path / "m", config_of(PERCEPTRON))

        assert "has no file 1/model.pt" in error.message
        assert "net.bin" in error.hint

    def test_a_path_out_of_the_folder_is_refused(self, scripted: Path) -> None:
        config = replace(config_of(PERCEPTRON), default_model_filename="../model.pt")

        assert "must stay within" in refusal(scripted, config).message

    def test_weights_that_would_run_code_are_refused_unless_they_may(self, eager: Path) -> None:
        torch.save({"hidden.weight": Malicious()}, eager / "1" / "model.pt")

        error = refusal(eager, config_of(PERCEPTRON, runtime="model.py"))
        allowed = refusal(eager, config_of(PERCEPTRON, runtime="model.py", parameters={"ALLOW_UNPICKLING": "true"}))

        assert "may run code when it is read" in error.message
        assert "ALLOW_UNPICKLING" in error.hint
        assert "code of the file was run" in allowed.message

    def test_an_exported_program_that_would_run_code_is_refused(self, tmp_path: Path) -> None:
        path = torch_models.exported_perceptron(tmp_path / "m")
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        [sample] = [name for name in entries if name.endswith("sample_inputs/model.pt")]
        torch.save(Malicious(), tmp_path / "bad.pt")
        entries[sample] = (tmp_path / "bad.pt").read_bytes()
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in entries.items():
                archive.writestr(name, content)

        error = refusal(tmp_path / "m", config_of(PERCEPTRON))

        assert "sample_inputs/model.pt in it may run code" in error.message

    def test_weights_that_do_not_fit_are_refused_with_their_names(self, eager: Path) -> None:
        torch.save({"hidden.weight": torch.zeros(1)}, eager / "1" / "model.pt")

        message = refusal(eager, config_of(PERCEPTRON, runtime="model.py")).message

        assert "model.pt does not fit model.py" in message
        assert "out.bias" in message

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("import nothing_of_that_name", "ModuleNotFoundError"),
            ("def broken(:", "line 1"),
            ("x = 1", "defines no subclass of torch.nn.Module"),
            (
                "import torch\nclass A(torch.nn.Module): pass\nclass B(torch.nn.Module): pass",
                "several subclasses of torch.nn.Module: A, B",
            ),
            ("import torch\nclass A(torch.nn.Module):\n    def __init__(self, n): pass", "model.py: A() failed"),
        ],
    )
    def test_a_module_in_python_that_cannot_be_made_is_refused(self, eager: Path, source: str, message: str) -> None:
        (eager / "1" / "model.py").write_text(source, encoding="utf-8")

        assert message in refusal(eager, config_of(PERCEPTRON, runtime="model.py")).message

    def test_an_operator_that_is_not_there_is_named(self, scripted: Path) -> None:
        path = scripted / "1" / "model.pt"
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in entries.items():
                archive.writestr(
                    name, content.replace(b"torch.relu", b"ops.elsewhere.op") if "code/" in name else content
                )

        error = refusal(scripted, config_of(PERCEPTRON))

        assert error.code is Code.INVALID_ARG
        assert "elsewhere" in error.message

    @pytest.mark.parametrize(
        ("inputs", "outputs", "message"),
        [
            (
                {"x": (INT64, (16,))},
                {"y": (FP32, (4,))},
                "expects datatype TYPE_INT64 for input 'x', model provides TYPE_FP32",
            ),
            ({"IN__0": (FP32, (15,))}, {"y": (FP32, (4,))}, "the model expects shape [-1, 16] but"),
            ({"x": (FP32, (16,))}, {"OUT__0": (FP32, (4, 1))}, "tensor 'OUT__0': the model expects 2 dimensions"),
            ({"x": (FP32, (16,))}, {"OUT__3": (FP32, (4,))}, "do not fit: the model returned RESULT"),
            ({"x": (FP32, (16,)), "z": (FP32, (1,))}, {"y": (FP32, (4,))}, "the model takes 'x' (ARGS[0])"),
            ({"x": (BYTES, (1,))}, {"y": (FP32, (4,))}, "expects datatype TYPE_STRING for input 'x'"),
        ],
    )
    def test_a_configuration_that_contradicts_an_exported_program_is_refused_with_both(
        self, tmp_path: Path, inputs: Specs, outputs: Specs, message: str
    ) -> None:
        torch_models.exported_perceptron(tmp_path / "m")

        assert message in str(refusal(tmp_path / "m", config_of((inputs, outputs))))

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ({"x": (BYTES, (1,))}, "is TYPE_STRING: the model's argument takes a tensor"),
            ({"x": (FP32, (16,)), "z": (FP32, (1,))}, "2 inputs are configured: the model takes 'x'"),
            ({"x": (BYTES, (2,))}, "expected dims [ 1 ] with batches"),
        ],
    )
    def test_a_configuration_that_contradicts_torchscript_is_refused(
        self, scripted: Path, inputs: Specs, message: str
    ) -> None:
        assert message in refusal(scripted, config_of((inputs, PERCEPTRON[1]))).message

    def test_an_instance_on_a_gpu_that_is_not_there_is_refused_with_the_reason(self, scripted: Path) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")

        with pytest.raises(ServingError) as caught:
            make(scripted, config_of(PERCEPTRON), Placement("m_0", InstanceKind.KIND_GPU, 0))

        assert caught.value.code is Code.UNSUPPORTED
        assert "instance 'm_0' needs a GPU" in caught.value.message
        assert "KIND_CPU" in caught.value.hint


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.out = nn.Linear(6, 5)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.out(self.conv(image).mean((2, 3))), "map": self.conv(image)}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.embedding(ids)
        return result


def shapes(config: ModelConfig) -> dict[str, tuple[DataType | None, tuple[int, ...]]]:
    tensors: Sequence[ModelInput | ModelOutput] = (*config.input, *config.output)
    return {tensor.name: (tensor.data_type, tensor.dims) for tensor in tensors}


class TestAutoComplete:
    def test_a_traced_model_is_completed_from_the_inputs_that_it_was_traced_with(self, tmp_path: Path) -> None:
        torch_models.save_traced(torch_models.Perceptron(), (torch.zeros(2, 16),), tmp_path / "m")

        config = complete(tmp_path / "m").config

        assert config.max_batch_size == 4
        assert config.dynamic_batching is not None
        assert shapes(config) == {"x": (FP32, (16,)), "OUTPUT__0": (FP32, (4,))}

    def test_a_scripted_model_is_completed_from_its_first_layers(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Vision(), tmp_path / "v")
        torch_models.save_scripted(Words(), tmp_path / "w")

        assert shapes(complete(tmp_path / "v").config) == {
            "image": (FP32, (3, -1, -1)),
            "logits": (FP32, (5,)),
            "map": (FP32, (6, -1, -1)),
        }
        assert shapes(complete(tmp_path / "w").config) == {"ids": (INT64, (-1,)), "OUTPUT__0": (FP32, (-1, 3))}

    def test_an_exported_program_is_completed_from_its_signature(self, tmp_path: Path) -> None:
        torch_models.exported_perceptron(tmp_path / "m")

        completion = complete(tmp_path / "m", ModelConfig(name="m", platform="torch_aoti"))

        assert shapes(completion.config) == {"x": (FP32, (16,)), "OUTPUT__0": (FP32, (4,))}
        assert completion.config.platform == ""
        assert completion.config.max_batch_size == 4

    def test_a_program_of_a_fixed_batch_does_not_batch(self, tmp_path: Path) -> None:
        torch_models.save_exported(torch_models.Perceptron(), (torch.zeros(2, 16),), (None,), tmp_path / "m")

        config = complete(tmp_path / "m").config

        assert config.max_batch_size == 0
        assert shapes(config) == {"x": (FP32, (2, 16)), "OUTPUT__0": (FP32, (2, 4))}

    def test_outputs_are_completed_by_a_trial_run_where_inputs_are_given(self, eager: Path) -> None:
        config = ModelConfig(name="m", runtime="model.py", max_batch_size=8, input=(ModelInput("x", FP32, dims=(16,)),))

        assert shapes(complete(eager, config).config) == {"x": (FP32, (16,)), "OUTPUT__0": (FP32, (4,))}

    @pytest.mark.parametrize(
        ("module", "note"),
        [
            (Text(), "inputs: could not be inferred; the arguments are texts (a list of strings)"),
            (Kinds(), "nothing tells datatype and dims of 'x'"),
        ],
    )
    def test_what_cannot_be_found_out_is_said(self, tmp_path: Path, module: nn.Module, note: str) -> None:
        torch_models.save_scripted(module, tmp_path / "m")

        completion = complete(tmp_path / "m")

        assert note in completion.notes[-1]
        refused = refusal(tmp_path / "m", completion.config)
        assert "model 'm' has no inputs: they are not configured, and inputs could not be inferred" in refused.message
        assert note.removeprefix("inputs: ") in refused.message
        assert refused.hint.startswith("declare them in m/config.pbtxt, beside the version's folder m/1: input { name:")

    @pytest.mark.parametrize(
        ("module", "tensors"),
        [
            (Kinds(), "x: TYPE_FP32 1, 512 -> OUTPUT__0: TYPE_FP32 1, 512"),
            (Rated(), "x: TYPE_FP32 1, 512; sr: TYPE_INT64 1 -> OUTPUT__0: TYPE_FP32 1, 256"),
            (Picture(), "x: TYPE_FP32 1, 3, 224, 224; scale: TYPE_FP64 1 -> OUTPUT__0: TYPE_FP32 1, 224, 224"),
        ],
    )
    def test_a_configuration_is_proposed_with_which_the_model_runs(
        self, tmp_path: Path, module: nn.Module, tensors: str
    ) -> None:
        torch_models.save_scripted(module, tmp_path / "m")
        proposed = refusal(tmp_path / "m", complete(tmp_path / "m").config).hint.partition("m/1: ")[2]

        config = parse(proposed)
        sides = (config.input, config.output)
        assert tensors == " -> ".join(
            "; ".join(f"{t.name}: {t.data_type.config} {', '.join(map(str, t.dims))}" for t in side if t.data_type)
            for side in sides
        )

    def test_the_file_of_a_served_model_gets_lines_to_paste(self, tmp_path: Path) -> None:
        torch_models.save_scripted(Kinds(), tmp_path / "own")
        file = (tmp_path / "own" / "1" / "model.pt").rename(tmp_path / "net work.jit")
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "1" / "model.pt").symlink_to(file)

        lines = refusal(tmp_path / "m", complete(tmp_path / "m").config).hint.splitlines()

        assert lines[0] == "these lines serve it, with dims that it took:"
        assert lines[2:4] == ["mkdir -p models/m/1", f"cp '{file}' models/m/1/model.pt"]
        assert lines[4].startswith('echo \'backend: "pytorch" input {')
        assert lines[5] == "charonia serve models"

    def test_a_trial_run_that_fails_is_said(self, scripted: Path) -> None:
        config = ModelConfig(name="m", max_batch_size=8, input=(ModelInput("x", FP32, dims=(5,)),))

        assert "a trial run on zeros failed: mat1 and mat2" in complete(scripted, config).notes[-1]

    def test_a_package_says_which_places_it_has(self, aoti_perceptron: Path) -> None:
        completion = complete(aoti_perceptron)

        assert "the package takes ARGS[0]" in completion.notes[-1]
        assert completion.config.instance_group == (InstanceGroup(kind=InstanceKind.KIND_CPU),)


class TestPackages:
    def test_a_shape_that_a_package_was_not_compiled_for_is_an_error(self, aoti_perceptron: Path) -> None:
        config = config_of(({"INPUT__0": (FP32, (-1,))}, {"OUTPUT__0": (FP32, (4,))}))

        with pytest.raises(ServingError, match="unmatched dim value"):
            make(aoti_perceptron, config).execute([ones(1, 5, "INPUT__0")])

    def test_a_package_for_another_machine_or_device_is_refused(self, tmp_path: Path) -> None:
        for key, value, message in (
            ("AOTI_DEVICE_KEY", "cuda", "was compiled for cuda, its instance runs on cpu"),
            ("AOTI_MACHINE", "riscv64", "was compiled for riscv64"),
        ):
            path = torch_models.folder_of(tmp_path / key) / "model.pt2"
            about = {"AOTI_DEVICE_KEY": "cpu", key: value}
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("m/data/aotinductor/model/x.wrapper_metadata.json", str(about).replace("'", '"'))

            assert message in refusal(tmp_path / key, config_of(PERCEPTRON)).message
