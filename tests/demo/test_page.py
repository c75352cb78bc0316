import numpy as np
from PIL import Image

from charonia.demo.models import scanned_page
from charonia.demo.page import read_word, recognition_input, words_of_page


def test_the_scanned_page_has_seven_lines_of_words() -> None:
    page = np.asarray(Image.open(scanned_page()))

    lines = words_of_page(page)

    assert [len(words) for words in lines][:6] == [2, 10, 9, 7, 11, 4]
    assert len(lines) == 7


def test_an_empty_page_has_no_words() -> None:
    assert words_of_page(np.full((50, 50), 200, np.uint8)) == []


def test_a_word_is_scaled_to_48_rows_and_padded_to_a_multiple_of_160() -> None:
    tensor = recognition_input(np.full((24, 100), 255, np.uint8))

    assert tensor.shape == (1, 3, 48, 320)
    assert (tensor[..., :200] == 1).all()
    assert (tensor[..., 200:] == 0).all()


def test_repeated_classes_are_one_character_and_a_blank_divides_them() -> None:
    scores = np.eye(3)[[1, 1, 0, 1, 2, 2]][np.newaxis]

    assert read_word(scores, ["", "a", "b"]) == "aab"
