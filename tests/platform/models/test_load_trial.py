"""What is read from a server that loads one model, and which models are not tried."""

from charonia.platform.models.check import obstacle, why_not_loaded

LOG = [
    'I1124 01:56:43.661848 27294 lifecycle.py:404] "loading: m:1"',
    "E1124 01:56:43.668134 27294 load_errors.py:54] \"load failed for model 'm': version 1 is at UNAVAILABLE state: "
    "model 'm': 2 problems in the model configuration\"",
    "    input[0].data_type: configuration expects datatype TYPE_INT32",
    "    output[0].name: unexpected inference output",
    'I1124 01:56:43.668423 27294 serve.py:423] "server stopped: not every model could be loaded"',
    "    of no interest",
]


def test_the_reason_is_what_was_logged_as_an_error_with_its_lines() -> None:
    assert why_not_loaded(LOG, 1) == (
        "model 'm': 2 problems in the model configuration\n"
        "input[0].data_type: configuration expects datatype TYPE_INT32\n"
        "output[0].name: unexpected inference output"
    )


def test_without_one_it_is_the_signal_or_the_last_line() -> None:
    assert why_not_loaded(["about to load", ""], -11) == "the process that loaded it was ended by signal 11"
    assert why_not_loaded(["Illegal instruction", ""], 1) == "Illegal instruction"
    assert why_not_loaded([], 1) == "it has ended"


def test_what_needs_a_gpu_or_other_models_is_not_tried() -> None:
    assert obstacle({"backend": "tensorrt"}) == "it asks for a GPU"
    assert obstacle({"backend": "pytorch", "instance_group": [{"kind": "KIND_GPU"}]}) == "it asks for a GPU"
    assert obstacle({"platform": "ensemble"}) == "its steps are other models"
    assert obstacle({"backend": "onnxruntime", "instance_group": [{"kind": "KIND_CPU"}]}) == ""
