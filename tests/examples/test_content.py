import numpy as np
from examples.demo.what_is_it import detection_input


def test_a_short_file_is_padded_behind_its_head_and_before_its_tail() -> None:
    tensor = detection_input(b"  abc\n")

    assert tensor.shape == (1, 2048)
    assert tensor.dtype == np.int32
    assert tensor[0, :5].tolist() == [97, 98, 99, 10, 256]
    assert tensor[0, -6:].tolist() == [256, 32, 32, 97, 98, 99]


def test_a_long_file_gives_its_first_and_last_1024_bytes() -> None:
    tensor = detection_input(b"a" * 5000 + b"b" * 5000)

    assert set(tensor[0, :1024].tolist()) == {97}
    assert set(tensor[0, 1024:].tolist()) == {98}


def test_an_empty_file_is_all_padding() -> None:
    assert set(detection_input(b"")[0].tolist()) == {256}
