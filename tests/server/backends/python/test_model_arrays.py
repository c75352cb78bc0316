"""The arrays that a Python model gets: a model may treat them as its own."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.python_model import HEAD, load, request

from charonia.server.backends.api import Outputs
from charonia.server.channel.channel import ALIGNMENT, INLINE_BYTES_MAX

IN_PLACE = (
    HEAD
    + """
    def execute(self, requests):
        responses = []
        for request in requests:
            array = value_of(request)
            array += 1
            responses.append(answer(array))
        return responses
"""
)

ADDRESS = (
    HEAD
    + """
    def execute(self, requests):
        return [answer(np.array([value_of(request).ctypes.data % 4096], np.float32)) for request in requests]
"""
)


@pytest.mark.parametrize("count", [3, INLINE_BYTES_MAX // 4, INLINE_BYTES_MAX])
async def test_a_model_may_compute_in_place_on_its_inputs(tmp_path: Path, count: int) -> None:
    loaded = await load(tmp_path, IN_PLACE)
    sent = np.arange(count, dtype=np.float32)
    for _ in range(3):
        (result,) = await loaded.run([request(sent)])
        assert isinstance(result, Outputs)
        np.testing.assert_array_equal(result.tensors[0].array, np.arange(count) + 1)
    np.testing.assert_array_equal(sent, np.arange(count))


async def test_inputs_lie_where_fresh_arrays_do_whatever_surrounds_them(tmp_path: Path) -> None:
    loaded = await load(tmp_path, ADDRESS)
    for name in ("", "a", "ab", "abc"):
        batch = [request(np.zeros(count, np.float32), id=name) for count in (1, 3, 5, 17, INLINE_BYTES_MAX)]
        for result in await loaded.run(batch):
            assert isinstance(result, Outputs)
            assert int(result.tensors[0].array[0]) % ALIGNMENT == 0
