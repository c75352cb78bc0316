"""Samples, and the comparison of two models' answers."""

import numpy as np
import pytest

from charonia.config.complete import SignatureTensor
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.server.backends.conversion import random_samples
from charonia.server.convert.convert import batches_of, compare, given_samples

X = SignatureTensor("x", DataType.FP32, (-1, 3))
Y = SignatureTensor("y", DataType.FP32, (-1, 2))
LABEL = SignatureTensor("label", DataType.BYTES, (-1,))


def test_random_samples_fit_the_inputs_and_are_the_same_each_time() -> None:
    inputs = [X, SignatureTensor("ids", DataType.INT64, (-1, -1)), SignatureTensor("city", DataType.BYTES, (-1, 1))]

    feed = random_samples(inputs, 5, {"city": ("Rome", "Oslo")}, scale=1.0)

    assert {name: (array.dtype.str, array.shape) for name, array in feed.items()} == {
        "x": ("<f4", (5, 3)),
        "ids": ("<i8", (5, 8)),
        "city": ("|O", (5, 1)),
    }
    assert set(feed["ids"].ravel()) == {0, 1}
    assert set(feed["city"].ravel()) <= {b"Rome", b"Oslo"}
    again = random_samples(inputs, 5, {"city": ("Rome", "Oslo")}, scale=1.0)
    assert all((again[name] == array).all() for name, array in feed.items())


def test_the_magnitude_of_random_samples_grows_to_the_scale() -> None:
    narrow = random_samples([X], 3, {}, scale=1.0)["x"]

    wide = random_samples([X], 3, {}, scale=100.0)["x"]

    np.testing.assert_allclose(wide.astype(float), narrow.astype(float) * [[1], [10], [100]], rtol=1e-6)


def test_texts_of_which_nothing_is_known_need_samples() -> None:
    with pytest.raises(ServingError, match=r"'city' takes texts.*--samples"):
        random_samples([SignatureTensor("city", DataType.BYTES, (-1, 1))], 2, {}, scale=1.0)


def test_given_samples_get_the_datatype_of_the_input() -> None:
    feed = given_samples([X, LABEL], {"x": np.ones((2, 3)), "label": np.array(["a", "ä"])})

    assert feed["x"].dtype == np.float32
    assert feed["label"].tolist() == [b"a", "ä".encode()]


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"z": np.ones((2, 3))}, "expected an array for input 'x', got z"),
        ({"x": np.ones((2, 4))}, r"takes FP32 \[-1, 3\], got float64 \[2, 4\]"),
        ({"x": np.ones(3)}, r"takes FP32 \[-1, 3\], got float64 \[3\]"),
        ({"x": np.array([["a", "b", "c"]])}, "takes FP32"),
    ],
)
def test_samples_that_do_not_fit_are_refused(arrays: dict[str, np.ndarray], problem: str) -> None:
    with pytest.raises(ServingError, match=problem):
        given_samples([X], arrays)


def test_samples_run_whole_and_as_a_batch_of_one() -> None:
    feed = {"x": np.ones((4, 3), np.float32)}

    assert [batch["x"].shape for batch in batches_of([X], feed)] == [(1, 3), (4, 3)]
    assert [batch["x"].shape for batch in batches_of([SignatureTensor("x", DataType.FP32, (4, 3))], feed)] == [(4, 3)]


def test_a_difference_is_absolute_and_relative() -> None:
    expected = [np.array([[1.0, 100.0]]), np.array([[2.0, 0.0], [4.0, np.nan]])]
    got = [np.array([[1.0, 100.5]]), np.array([[2.5, 0.0], [4.0, np.nan]])]

    found = compare(Y, expected, got, 0.01)

    assert (found.absolute, found.relative) == (0.5, 0.25)
    assert (found.beyond, found.elements) == (1, 6), "0.5 of 100 is within 0.01 + 0.01 * 100, 0.5 of 2 is not"


@pytest.mark.parametrize(("one", "other"), [(1.0, np.nan), (np.nan, 1.0), (np.inf, 1e30), (np.inf, -np.inf)])
def test_what_is_not_finite_in_one_only_is_beyond_any_tolerance(one: float, other: float) -> None:
    assert compare(Y, [np.array([[one, 1.0]])], [np.array([[other, 1.0]])], 1e6).beyond == 1


def test_texts_and_integers_are_equal_or_not() -> None:
    texts = compare(LABEL, [np.array(["a", "b"])], [np.array([b"a", b"c"], object)], 1.0)
    numbers = compare(SignatureTensor("n", DataType.INT64, (-1,)), [np.array([1, 2])], [np.array([1, 2])], 0.0)

    assert (texts.beyond, texts.is_exact) == (1, True)
    assert (numbers.beyond, numbers.is_exact) == (0, True)


def test_answers_of_another_size_are_an_error() -> None:
    with pytest.raises(ServingError, match=r"batch 1 with shape \[2, 2\], the converted model with \[2, 3\]"):
        compare(Y, [np.ones((2, 2))], [np.ones((2, 3))], 1.0)


def test_a_dimension_of_one_more_is_the_same_answer() -> None:
    assert compare(Y, [np.ones(3)], [np.ones((3, 1))], 0.0).beyond == 0


def test_answers_that_are_all_alike_compare_little() -> None:
    assert compare(Y, [np.ones((3, 2))], [np.ones((3, 2))], 0.0).is_alike
    assert not compare(Y, [np.eye(2)], [np.eye(2)], 0.0).is_alike
