import os

import numpy as np
import pytest

from charonia.server.channel.regions import Mappings, make_memory


@pytest.mark.parametrize("has_memfd", [True, False], ids=["memfd", "a system without memfd"])
def test_an_array_outlives_the_mapping_that_it_lies_in(has_memfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    fd = make_memory(4096)
    os.write(fd, np.arange(1024, dtype=np.int32).tobytes())
    mappings = Mappings()
    mappings.add(1, fd)
    array = np.ndarray((1024,), np.int32, mappings.view(1, 4096))

    mappings.close()

    assert array.sum() == 1023 * 512
