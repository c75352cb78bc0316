"""Language models for tests, as Python models: one that speaks OpenAI's API as engines do, and plain ones."""

from pathlib import Path

from tests.support.models import answering, chain_pbtxt, identity_pbtxt, write_model

from charonia.core.dtypes import DataType

ENGINE = """
import json
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def chunk(body, content, reason=None):
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": reason}
    return json.dumps({"id": "e-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"],
                       "choices": [choice]})


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request, request.get_response_sender())

    def answer(self, request, sender):
        parameters = json.loads(request.parameters())
        body = json.loads(pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0])
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

        def response(text, usage=()):
            tensor = pb_utils.Tensor("text_output", np.array([text.encode()], object))
            return pb_utils.InferenceResponse([tensor], parameters=dict(usage))

        def error(text, code=pb_utils.TritonError.INVALID_ARG):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))

        messages = body.get("messages") or [{"content": str(body.get("input"))}]
        asked = messages[-1]["content"]
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2}
        if asked == "refuse":
            sender.send(error("temperature: expected 0 to 2, got 9"), final)
        elif not body.get("stream"):
            message = {"role": "assistant", "content": parameters["openai"] + " " + parameters.get("lora_name", "")}
            document = {"id": "e-1", "object": "chat.completion", "created": 1, "model": body["model"],
                        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}
            sender.send(response(json.dumps(document), usage))
            sender.send(flags=final)
        elif parameters["openai"] == "responses":
            for kind in ("response.created", "response.completed"):
                sender.send(response("event: %s\\ndata: %s" % (kind, json.dumps({"type": kind, "sequence_number": 1}))))
            sender.send(flags=final)
        elif asked == "break":
            sender.send(response(chunk(body, "one")))
            sender.send(error("the engine has died", pb_utils.TritonError.INTERNAL), final)
        elif asked in ("endless", "slow"):
            text, pause_s = ("x" * 10_000, 0.0005) if asked == "endless" else ("xxx ", 0.02)
            while not sender.is_cancelled():
                sender.send(response(chunk(body, text)))
                time.sleep(pause_s)
            pathlib.Path(__file__).with_name("cancelled").touch()
            sender.send(flags=final)
        else:
            for number in range(3):
                sender.send(response(chunk(body, f"{number} ")))
            sender.send(response(chunk(body, "", "stop"), usage))
            sender.send(flags=final)
"""
ENGINE_CONFIG = """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
model_transaction_policy { decoupled: true }
parameters { key: "openai_routes" value { string_value: "chat/completions, completions, responses" } }
parameters { key: "lora_adapters" value { string_value: "poet" } }
"""

CROWD = """
import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, arguments):
        self.open = 0
        self.lock = threading.Lock()

    def execute(self, requests):
        for request in requests:
            body = json.loads(pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0])
            sender = request.get_response_sender()
            if body.get("stream"):
                self.open += 1
                threading.Thread(target=self.stream, args=(sender,)).start()
            else:
                self.send(sender, {"choices": [], "open": self.open})
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def stream(self, sender):
        while not sender.is_cancelled():
            self.send(sender, {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]})
            time.sleep(0.2)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.lock:
            self.open -= 1

    def send(self, sender, document):
        head = {"id": "e-1", "object": "chat.completion.chunk", "created": 1, "model": "crowd"}
        text = json.dumps({**head, **document}).encode()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text], object))]))
"""
"""An engine of which many requests are open; an answer that is not streamed says how many."""

PLAIN = '''
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Repeats the prompt, byte by byte, so that characters come in pieces; at most max_tokens characters."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            given = pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
            sampling = json.loads(given.as_numpy().ravel()[0]) if given is not None else {}
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0].decode()
            if "fail" in prompt:
                code = pb_utils.TritonError.UNAVAILABLE
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no capacity", code)), 1)
                continue
            text = prompt[: sampling.get("max_tokens", 1000)]
            if "seed" in sampling:
                text = "seed %d" % sampling["seed"]
            for byte in text.encode():
                if sender.is_cancelled():
                    break
                outputs = [pb_utils.Tensor("text_output", np.array([bytes([byte])], object)),
                           pb_utils.Tensor("num_input_tokens", np.array([len(prompt)], np.uint32)),
                           pb_utils.Tensor("num_output_tokens", np.array([byte < 128 or byte > 191], np.uint32))]
                sender.send(pb_utils.InferenceResponse(outputs))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
PLAIN_CONFIG = """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
         { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] },
         { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""

WHOLE_CONFIG = """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "chat_template" value { string_value: "own.jinja" } }
"""
TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif -%}
<{{ message.role }}>{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""

EMBEDDING_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "vector" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


def write_language_models(folder: Path) -> None:
    """Write the models `engine`, `crowd`, `plain`, `whole`, `steps`, `embedding`, and `numbers`, no language model."""
    write_model(folder, "engine", ENGINE, config=ENGINE_CONFIG)
    write_model(folder, "crowd", CROWD, config=ENGINE_CONFIG)
    write_model(folder, "plain", PLAIN, config=PLAIN_CONFIG)
    write_model(folder, "whole", answering("array.ravel()[:1]", "text_output"), config=WHOLE_CONFIG)
    (folder / "whole" / "own.jinja").write_text(TEMPLATE)
    steps = chain_pbtxt(
        "whole", given="text_input", wanted="text_output", datatype=DataType.BYTES, dims=(1,), max_batch_size=0
    )
    write_model(folder, "steps", "", config=steps)
    (folder / "steps" / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    vectors = "np.array([[len(text), 1, 2] for text in array.ravel()], np.float32)"
    write_model(folder, "embedding", answering(vectors, "vector"), config=EMBEDDING_CONFIG)
    write_model(folder, "numbers", "", config=identity_pbtxt(dims=(1,), max_batch_size=4))
