"""Variants: the configurations that they produce, their names and their folders."""

from dataclasses import replace
from pathlib import Path

import pytest

from charonia.config.json_form import from_json
from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, InstanceGroup, ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError
from charonia.tools.tune.api import ModelChange, Variant
from charonia.tools.tune.output import LIST, OutputRepository
from charonia.tools.tune.variants import (
    BaseModel,
    Names,
    apply_change,
    apply_variant,
    effective_text,
    instance_group_text,
    instance_kind,
    load_text,
    serving_text,
)

TENSORS = 'input { name: "IN" data_type: TYPE_FP32 dims: 4 } output { name: "OUT" data_type: TYPE_FP32 dims: 4 }'
BATCHING = parse(f'name: "m" backend: "onnxruntime" max_batch_size: 8 {TENSORS}')
ENSEMBLE = parse(
    f'name: "e" platform: "ensemble" max_batch_size: 8 {TENSORS} ensemble_scheduling {{ step {{ model_name: "m" '
    'model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } }'
)


def model(config: ModelConfig = BATCHING, name: str = "m") -> BaseModel:
    group = InstanceGroup(name=f"{name}_0", kind=InstanceKind.KIND_CPU, count=1)
    return BaseModel(name, config, replace(config, instance_group=(group,)))


def test_the_configuration_of_an_empty_change_is_the_models_own() -> None:
    assert apply_change(model(), ModelChange("m")) == BATCHING


def test_a_batch_size_turns_dynamic_batching_on() -> None:
    made = apply_change(model(), ModelChange("m", max_batch_size=4))

    assert made.max_batch_size == 4
    assert made.dynamic_batching == DynamicBatching()


def test_preferred_sizes_that_no_longer_fit_are_left_out() -> None:
    own = replace(
        BATCHING, dynamic_batching=DynamicBatching(preferred_batch_size=(2, 4, 8), max_queue_delay_microseconds=50)
    )

    made = apply_change(model(own), ModelChange("m", max_batch_size=4))

    assert made.dynamic_batching == DynamicBatching(preferred_batch_size=(2, 4), max_queue_delay_microseconds=50)


def test_instances_are_one_group_of_the_kind_that_the_model_runs_on() -> None:
    made = apply_change(model(), ModelChange("m", instance_count=3, thread_count=2))

    assert made.instance_group == (InstanceGroup(kind=InstanceKind.KIND_CPU, count=3),)
    assert made.parameters == {"intra_op_thread_count": "2"}
    assert instance_group_text(made) == "3:CPU"
    groups = (InstanceGroup(name="a", count=1, passive=True), InstanceGroup(name="b", count=1))
    grouped = apply_change(model(replace(BATCHING, instance_group=groups)), ModelChange("m", instance_count=3))
    assert grouped.instance_group == (InstanceGroup(name="a", kind=InstanceKind.KIND_CPU, count=3, passive=True),)


def test_a_number_of_instances_that_is_tried_does_not_follow_the_load() -> None:
    scaled = replace(BATCHING, parameters={"INSTANCES_MIN": "1", "INSTANCES_MAX": "4", "execution_mode": "1"})

    assert apply_change(model(scaled), ModelChange("m", instance_count=2)).parameters == {"execution_mode": "1"}
    assert apply_change(model(scaled), ModelChange("m", max_batch_size=4)).parameters == scaled.parameters


def test_whole_fields_are_replaced_by_what_yaml_gave() -> None:
    fields = (
        ("instance_group", '[{"count": 2, "kind": "KIND_CPU"}]'),
        ("dynamic_batching", '{"max_queue_delay_microseconds": 200}'),
        ("parameters", '{"execution_mode": 1}'),
    )

    made = apply_change(model(), ModelChange("m", fields=fields))

    assert instance_group_text(made) == "2:CPU"
    assert made.dynamic_batching == DynamicBatching(max_queue_delay_microseconds=200)
    assert made.parameters == {"execution_mode": "1"}


def test_another_backend_takes_the_platform_of_the_first_along() -> None:
    own = replace(BATCHING, platform="onnxruntime_onnx", default_model_filename="model.onnx")

    made = apply_change(model(own), ModelChange("m", fields=(("backend", '"openvino"'),)))

    assert made == replace(own, backend="openvino", platform="")


def test_a_field_that_is_no_such_value_is_refused() -> None:
    with pytest.raises(ServingError, match="model_config_parameters"):
        apply_change(model(), ModelChange("m", fields=(("instance_group", '[{"count": "many"}]'),)))


def test_an_ensemble_batches_no_more_than_its_models() -> None:
    bases = {"e": BaseModel("e", ENSEMBLE, ENSEMBLE), "m": model()}

    configs = apply_variant(bases, Variant((ModelChange("m", max_batch_size=2),)))

    assert (configs["e"].max_batch_size, configs["m"].max_batch_size) == (2, 2)


@pytest.mark.parametrize(
    ("kinds", "cpu_only", "expected"),
    [
        ([], False, InstanceKind.KIND_CPU),
        ([InstanceKind.KIND_AUTO], False, InstanceKind.KIND_CPU),
        ([InstanceKind.KIND_GPU], False, InstanceKind.KIND_GPU),
        ([InstanceKind.KIND_GPU], True, InstanceKind.KIND_CPU),
        ([InstanceKind.KIND_CPU, InstanceKind.KIND_GPU], False, InstanceKind.KIND_GPU),
    ],
)
def test_instances_run_where_the_server_put_them(
    kinds: list[InstanceKind], cpu_only: bool, expected: InstanceKind
) -> None:
    config = replace(BATCHING, instance_group=tuple(InstanceGroup(kind=kind) for kind in kinds))

    assert instance_kind(config, cpu_only=cpu_only) is expected


def test_configurations_are_numbered_and_equal_ones_share_their_number() -> None:
    names, base = Names(), model()
    configs = [apply_change(base, ModelChange("m", instance_count=count)) for count in (1, 2, 1)]

    assert [names.name(base, config) for config in configs] == ["m_config_0", "m_config_1", "m_config_0"]
    assert names.name(base, BATCHING) == "m_config_default"


def test_a_load_request_says_only_what_is_set() -> None:
    batching = replace(BATCHING, dynamic_batching=DynamicBatching())

    assert "max_inflight_requests" not in load_text(ENSEMBLE)
    assert from_json(load_text(ENSEMBLE)) == ENSEMBLE
    assert from_json(load_text(batching)) == batching


def test_an_ensemble_of_other_configurations_is_another_configuration() -> None:
    names, bases = Names(), {"e": BaseModel("e", ENSEMBLE, ENSEMBLE), "m": model()}

    def named(count: int | None) -> dict[str, str]:
        variant = Variant((ModelChange("m", instance_count=count),))
        return names.names(bases, apply_variant(bases, variant), ["e"])

    assert named(None) == {"m": "m_config_default", "e": "e_config_default"}
    assert named(2) == {"m": "m_config_0", "e": "e_config_0"}
    assert named(3) == {"m": "m_config_1", "e": "e_config_1"}
    assert named(2) == {"m": "m_config_0", "e": "e_config_0"}


def test_a_model_whose_callees_have_other_configurations_has_another_configuration() -> None:
    names, bases = Names(), {"m": model(), "called": model(name="called")}

    def named(count: int | None) -> dict[str, str]:
        return names.names(bases, apply_variant(bases, Variant((ModelChange("called", instance_count=count),))), ["m"])

    assert named(None) == {"called": "called_config_default", "m": "m_config_default"}
    assert named(2) == {"called": "called_config_0", "m": "m_config_0"}
    assert list(named(3).items()) == [("called", "called_config_1"), ("m", "m_config_1")]


@pytest.mark.parametrize(
    ("groups", "count"),
    [
        ((), 1),
        ((InstanceGroup(count=0),), 1),
        ((InstanceGroup(count=2, gpus=(0, 1)), InstanceGroup(count=3)), 7),
    ],
)
def test_instances_of_all_groups_on_all_gpus_count(groups: tuple[InstanceGroup, ...], count: int) -> None:
    assert BaseModel("m", BATCHING, replace(BATCHING, instance_group=groups)).instance_count == count


def test_a_variant_that_writes_the_default_down_makes_the_same_server() -> None:
    bases = {"m": model()}

    def text(count: int) -> str:
        return effective_text(bases, Variant((ModelChange("m", instance_count=count),)))

    assert text(1) == effective_text(bases, Variant())
    assert text(2) != text(1)


def repository(folder: Path) -> Path:
    version = folder / "models" / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"onnx")
    (version.parent / "labels.txt").write_text("a\n")
    (version.parent / "config.pbtxt").write_text(serving_text(BATCHING))
    return folder / "models"


def test_a_variants_folder_is_ready_to_serve(tmp_path: Path) -> None:
    output = OutputRepository(tmp_path / "out", repository(tmp_path), override=False)
    output.open(["m"], "scope")

    first = output.write("m", "m_config_default", BATCHING)
    second = output.write("m", "m_config_0", replace(BATCHING, max_batch_size=2))

    assert parse((second / "config.pbtxt").read_text()) == replace(BATCHING, name="", max_batch_size=2)
    assert (first / "1" / "model.onnx").read_bytes() == b"onnx"
    assert (second / "1").is_symlink()
    assert (second / "1" / "model.onnx").read_bytes() == b"onnx"
    assert (second / "labels.txt").read_text() == "a\n"


def test_an_ensembles_steps_are_the_variants_beside_it(tmp_path: Path) -> None:
    output = OutputRepository(tmp_path / "out", None, override=False)
    output.open(["e", "m"], "scope")

    folder = output.write("e", "e_config_0", ENSEMBLE, {"m": "m_config_1", "e": "e_config_0"})

    scheduling = parse((folder / "config.pbtxt").read_text()).ensemble_scheduling
    assert scheduling is not None
    assert scheduling.step[0].model_name == "m_config_1"


def test_override_removes_only_what_was_written_here(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = OutputRepository(out, None, override=False)
    first.open(["m", "other"], "scope")
    first.write("m", "m_config_7", BATCHING)
    first.write("other", "other_config_0", BATCHING)
    (out / "precious").mkdir()
    (out / "precious" / "data").write_text("x")

    OutputRepository(out, None, override=True).open(["m"], "another scope")

    assert sorted(path.name for path in out.iterdir()) == [LIST, "other_config_0", "precious"]


def test_folders_of_the_same_run_are_gone_on_with_and_those_of_another_are_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = OutputRepository(out, None, override=False)
    first.open(["m"], "scope")
    first.write("m", "m_config_0", BATCHING)

    again = OutputRepository(out, None, override=False)
    again.open(["m"], "scope")
    again.write("m", "m_config_0", BATCHING)

    with pytest.raises(ServingError, match="of another run"):
        OutputRepository(out, None, override=False).open(["m"], "another scope")


def test_folders_of_a_run_that_measured_nothing_are_in_no_later_runs_way(tmp_path: Path) -> None:
    failed = OutputRepository(tmp_path, None, override=False)
    failed.open(["m"], "one scope")
    failed.write("m", "m_config_default", BATCHING)

    failed.discard(["m"])

    later = OutputRepository(tmp_path, None, override=False)
    later.open(["m"], "another scope")
    assert [entry.name for entry in tmp_path.iterdir()] == [LIST]


def test_a_folder_that_the_tool_did_not_make_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "m_config_0").mkdir()

    with pytest.raises(ServingError, match="was not made by charonia tune"):
        OutputRepository(tmp_path, None, override=True).open(["m"], "scope")

    assert (tmp_path / "m_config_0").is_dir()


def test_variants_do_not_go_into_the_model_repository(tmp_path: Path) -> None:
    source = repository(tmp_path)

    with pytest.raises(ServingError, match="outside the model repository"):
        OutputRepository(source / "out", source, override=False).open(["m"], "scope")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ServingError, match="cannot be written"):
        OutputRepository(tmp_path / "file" / "out", None, override=False).open(["m"], "scope")


def test_instance_groups_that_write_the_default_down_make_the_same_server() -> None:
    bases = {"m": model()}

    def text(group: str) -> str:
        return effective_text(bases, Variant((ModelChange("m", fields=(("instance_group", group),)),)))

    default = effective_text(bases, Variant())
    assert text('[{"kind": "KIND_CPU", "count": 1}]') == default
    assert text('[{"count": 1}]') == default
    assert text('[{"kind": "KIND_CPU"}]') == default
    assert text('[{"kind": "KIND_CPU", "count": 2}]') != default


def test_without_a_gpu_instances_for_gpus_run_on_the_cpu() -> None:
    change = ModelChange("m", fields=(("instance_group", '[{"kind": "KIND_GPU", "count": 2, "gpus": [0]}]'),))

    assert apply_change(model(), change).instance_group == (
        InstanceGroup(kind=InstanceKind.KIND_GPU, count=2, gpus=(0,)),
    )
    assert apply_change(replace(model(), has_gpu=False), change).instance_group == (
        InstanceGroup(kind=InstanceKind.KIND_CPU, count=2),
    )
