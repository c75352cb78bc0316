"""The tokens of language models that answer with one response, however their requests run."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from tests.support.in_place import FixedPlace

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import internal
from charonia.core.request import InferRequest
from charonia.core.response import Outcome
from charonia.core.tensor import Tensor
from charonia.server.backends.api import Execution, Outputs, Placement, Result
from charonia.server.execution.executor import BlockingExecutor
from charonia.server.execution.runner import ModelRunner
from charonia.server.scheduling.schedulers import make_scheduler


class Model:
    """Says that a prompt and its answer have five and two tokens; fails with an empty prompt."""

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        return Execution([self._result(request.inputs["text_input"].array[0]) for request in requests], 1, 2)

    def _result(self, prompt: bytes) -> Result:
        if not prompt:
            return internal("no prompt")
        tensor = Tensor("text_output", DataType.BYTES, np.array([prompt], object))
        return Outputs([tensor], {"prompt_tokens": 5, "completion_tokens": 2})

    def close(self) -> None:
        """Nothing to close."""


def asked(prompt: bytes) -> InferRequest:
    return InferRequest("m", {"text_input": Tensor("text_input", DataType.BYTES, np.array([prompt], object))})


@pytest.mark.parametrize("way", ["alone", "together", "in a thread"])
def test_tokens_of_an_answer_in_one_response_are_counted(way: str) -> None:
    async def main() -> ModelRunner:
        loop = asyncio.get_running_loop()
        config = ModelConfig(
            name="m",
            input=(ModelInput("text_input", DataType.BYTES, dims=(1,)),),
            output=(ModelOutput("text_output", DataType.BYTES, (1,)),),
        )
        executor = BlockingExecutor(Model(), Placement("m_0", InstanceKind.KIND_CPU), loop)
        executor.rule = FixedPlace(in_place=way != "in a thread")
        made = ModelRunner(config, "1", scheduler=make_scheduler(config), executors=[executor], labels={}, loop=loop)
        requests = [asked(b"one"), asked(b""), asked(b"two")]
        taken: list[Outcome] = []
        if way == "together":
            while len(taken) < len(requests):
                taken += made.run_together(requests[len(taken) :])
        else:
            for request in requests:
                made.submit(request, lambda outcome, final: taken.append(outcome))
        await made.drain()
        await made.aclose()
        return made

    tokens = asyncio.run(main()).metrics.tokens
    assert tokens is not None
    assert (tokens.prompt, tokens.completion, tokens.prompts.count) == (10, 4, 2)
    assert tokens.first_ns.count == tokens.per_token_ns.count == 0
