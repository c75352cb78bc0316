"""The image backend, compared with the same steps in Pillow and numpy, written out."""

import io
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps, JpegImagePlugin
from tests.support.backends import CPU, complete, load
from tests.support.photos import PHOTOS, encoded, noise, photo

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput, Reshape
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import ModelFiles, Outputs, Result
from charonia.server.backends.image import instance as image_instance
from charonia.server.backends.image.backend import ImageBackend
from charonia.server.backends.image.instance import ImageInstance
from charonia.testing.backend_suite import BackendCase, BackendSuite, arrays

NO_FILES = ModelFiles(Path("m"), 1, Path("m/1"))
CLASSIFIER = {
    "resize": "shorter_side",
    "size": "256",
    "crop": "224",
    "mean": "0.485,0.456,0.406",
    "std": "0.229,0.224,0.225",
}
completed = partial(complete, ImageBackend, NO_FILES)
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def request(*files: bytes) -> InferRequest:
    array = np.empty((len(files), 1), object)
    array[:, 0] = files
    return InferRequest("m", {"IMAGE": Tensor("IMAGE", DataType.BYTES, array)})


def loaded(config: ModelConfig, threads: int = 2) -> ImageInstance:
    model: ImageInstance = load(ImageBackend, NO_FILES, config, place=replace(CPU, threads=threads))
    return model


def instance(datatype: DataType | None = None, extra: Sequence[str] = (), /, **parameters: str) -> ImageInstance:
    """A model with these parameters; `datatype` of its pixels where it is not FP32, and further outputs."""
    config = ModelConfig(name="m", backend="image", parameters=parameters)
    if datatype is not None or extra:
        dims = completed(config).config.output[0].dims
        kinds = {"SCALE": DataType.FP32, "PADDING": DataType.INT32, "ORIGINAL_SIZE": DataType.INT32}
        outputs = [ModelOutput("PIXELS", datatype or DataType.FP32, dims)]
        config = replace(config, output=(*outputs, *(ModelOutput(name, kinds[name], (2,)) for name in extra)))
        config = replace(config, max_batch_size=8 if -1 not in dims else 0)
    return loaded(completed(config).config)


def answer(model: ImageInstance, *files: bytes) -> Result:
    """The result for these files in a request. Models without batches take one."""
    asked = request(*files)
    if not model.is_batched:
        asked.inputs["IMAGE"] = Tensor("IMAGE", DataType.BYTES, asked.inputs["IMAGE"].array[0])
    [result] = model.execute([asked]).results
    return result


def pixels(model: ImageInstance, *files: bytes) -> NDArray[Any]:
    array = arrays(answer(model, *files))["PIXELS"]
    return array if model.is_batched else array[None]


def failure(model: ImageInstance, file: bytes) -> ServingError:
    error = answer(model, file)
    assert isinstance(error, ServingError)
    return error


def classifier_input(file: bytes, resample: Image.Resampling = Image.Resampling.BILINEAR) -> NDArray[np.float32]:
    """What torchvision's Resize(256), CenterCrop(224), ToTensor and Normalize make of a file."""
    image = Image.open(io.BytesIO(file)).convert("RGB")
    width, height = image.size
    size = (256, int(256 * height / width)) if width <= height else (int(256 * width / height), 256)
    left, top = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
    small = image.resize(size, resample).crop((left, top, left + 224, top + 224))
    values = (np.asarray(small, np.float32) / np.float32(255) - MEAN) / STD
    return np.ascontiguousarray(values.transpose(2, 0, 1))


class TestImageBackend(BackendSuite):
    @pytest.fixture
    def backend_case(self) -> BackendCase:
        parameters = {"resize": "letterbox", "size": "32x24", "padding_value": "114", "threads": "2"}
        config = ModelConfig(name="m", backend="image", max_batch_size=8, parameters=parameters)

        def asked(seed: int, size: int) -> InferRequest:
            return request(*(encoded(noise(20 + seed, 30 + row, seed=seed)) for row in range(size)))

        return BackendCase(
            ImageBackend,
            NO_FILES,
            completed(config).config,
            asked,
            bad_request=lambda: request(b"no image"),
            needs_files=False,
        )


@pytest.mark.parametrize("name", PHOTOS)
def test_not_one_bit_differs_from_pillow_where_exact_is_true(name: str) -> None:
    model = instance(exact="true", **CLASSIFIER)

    np.testing.assert_array_equal(pixels(model, photo(name))[0], classifier_input(photo(name)))


@pytest.mark.skipif(find_spec("cykooz_resizer") is None, reason="cykooz-resizer has no wheel for this platform")
@pytest.mark.parametrize("name", PHOTOS)
@pytest.mark.parametrize("kind", ["bilinear", "bicubic", "lanczos", "box"])
def test_few_pixels_differ_from_pillow_and_those_by_one_step_of_255(name: str, kind: str) -> None:
    model = instance(filter=kind, **CLASSIFIER)

    expected = classifier_input(photo(name), Image.Resampling[kind.upper()])
    difference = np.abs(pixels(model, photo(name))[0] - expected) * STD[:, None, None] * 255

    assert difference.max() < 1.01
    assert (difference > 0.01).mean() < 0.01


@pytest.mark.parametrize(("width", "height"), [(37, 3000), (3000, 37), (50, 40), (1, 1), (224, 500)])
@pytest.mark.parametrize("mode", [CLASSIFIER, {"resize": "letterbox", "size": "224", "mean": "0.5", "std": "0.5"}])
def test_images_of_all_proportions_are_resized_as_pillow_does_it(width: int, height: int, mode: dict[str, str]) -> None:
    smooth = noise(8, 8).resize((width, height), Image.Resampling.BICUBIC)

    fast = pixels(instance(**mode), encoded(smooth))
    exact = pixels(instance(exact="true", **mode), encoded(smooth))

    assert np.abs(fast - exact).max() < 1.01 / 255 / 0.22


@pytest.mark.skipif(find_spec("cykooz_resizer") is None, reason="cykooz-resizer has no wheel for this platform")
def test_images_of_any_size_are_resized_into_any_frame() -> None:
    random = np.random.default_rng(3)
    for _ in range(300):
        width, height, out_width, out_height = (int(side) for side in random.integers(1, 400, 4))
        kind = ["bilinear", "bicubic", "lanczos", "box"][random.integers(4)]
        size = f"{out_width}x{out_height}"
        shapes = [{"resize": "letterbox", "size": size}, {"resize": "stretch", "size": size}]
        shapes.append({"resize": "shorter_side", "size": str(out_width), "crop": str(max(1, out_width - 3))})
        model = instance(DataType.UINT8, filter=kind, **shapes[random.integers(3)])

        file = encoded(noise(width, height, "L"), "BMP")

        assert isinstance(answer(model, file), Outputs), (width, height, kind, model)


def test_pillow_resizes_where_the_fast_resizer_is_not_known_to_read_its_images(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(image_instance, "PILLOW_MAJOR_MAX", 1)
    caplog.set_level("INFO")

    model = instance(**CLASSIFIER)

    np.testing.assert_array_equal(pixels(model, photo())[0], classifier_input(photo()))
    assert "images are resized by Pillow" in caplog.text


def test_without_antialiasing_pixels_are_those_of_opencv() -> None:
    cv2 = pytest.importorskip("cv2")
    model = instance(DataType.UINT8, resize="stretch", size="200x100", antialias="false", layout="NHWC")

    whole = np.asarray(Image.open(io.BytesIO(photo())))
    expected = cv2.resize(whole, (200, 100), interpolation=cv2.INTER_LINEAR).astype(int)

    assert np.abs(pixels(model, photo())[0] - expected).max() <= 1


def test_an_image_without_resizing_has_its_own_pixels_and_size() -> None:
    image = noise(13, 7)

    array = pixels(instance(DataType.UINT8, layout="NHWC"), encoded(image))[0]

    np.testing.assert_array_equal(array, np.asarray(image))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("datatype", [DataType.FP32, DataType.FP16, DataType.UINT8])
@pytest.mark.parametrize("color", ["RGB", "BGR", "GRAY"])
def test_every_layout_datatype_and_color(layout: str, datatype: DataType, color: str) -> None:
    image = noise(8, 6)
    model = instance(datatype, crop="8x6", layout=layout, color=color)

    expected = np.asarray(image.convert("L") if color == "GRAY" else image).reshape(6, 8, -1)
    expected = expected[..., ::-1] if color == "BGR" else expected
    expected = expected if layout == "NHWC" else expected.transpose(2, 0, 1)
    if datatype is not DataType.UINT8:
        expected = (expected.astype(np.float32) / np.float32(255)).astype(datatype.numpy)

    np.testing.assert_array_equal(pixels(model, encoded(image))[0], expected)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_half_precision_is_rounded_once(layout: str) -> None:
    whole = pixels(instance(layout=layout, **CLASSIFIER), photo())

    half = pixels(instance(DataType.FP16, layout=layout, **CLASSIFIER), photo())

    np.testing.assert_array_equal(half, whole.astype(np.float16))


@pytest.mark.parametrize(("scale", "value"), [("1", 255), ("2", 510), ("0.5", 127.5), ("1/255", 1), ("2/51", 10)])
def test_a_scale_is_a_factor(scale: str, value: float) -> None:
    white = encoded(Image.new("RGB", (4, 4), "white"))

    assert pixels(instance(crop="4", scale=scale), white)[0, :, 0, 0].tolist() == [value] * 3


def test_mean_and_std_are_in_the_order_of_the_outputs_channels() -> None:
    red = encoded(Image.new("RGB", (4, 4), (255, 0, 0)))
    model = instance(crop="4", color="BGR", scale="1", mean="1,2,3", std="1,1,2")

    assert pixels(model, red)[0, :, 0, 0].tolist() == [-1, -2, 126]


def test_padding_is_a_pixel_value_that_is_normalised_like_the_others() -> None:
    image = encoded(Image.new("RGB", (4, 2), (255, 255, 255)))
    model = instance(None, ["SCALE"], resize="letterbox", size="4", padding_value="0,51,255", mean="0.5")

    [one] = pixels(model, image)

    np.testing.assert_allclose(one[:, 0, 0], [-0.5, -0.3, 0.5], rtol=1e-6)
    np.testing.assert_array_equal(one[:, 1:3], np.full((3, 2, 4), 0.5, np.float32))
    np.testing.assert_array_equal(one[:, 3], one[:, 0])


def test_a_letterbox_says_how_to_map_boxes_back() -> None:
    model = instance(resize="letterbox", size="640", padding_value="114")

    wide, tall = encoded(Image.new("RGB", (1280, 720))), encoded(Image.new("RGB", (320, 640)))
    told = arrays(model.execute([request(wide, tall)]).results[0])

    assert told["SCALE"].tolist() == [[0.5, 0.5], [1, 1]]
    assert told["PADDING"].tolist() == [[0, 140], [160, 0]]
    assert told["ORIGINAL_SIZE"].tolist() == [[1280, 720], [320, 640]]


def test_a_crop_is_a_negative_padding() -> None:
    model = instance(None, ["PADDING", "ORIGINAL_SIZE"], crop="4")

    told = arrays(model.execute([request(encoded(noise(10, 4)))]).results[0])

    assert told["PADDING"].tolist() == [[-3, 0]]
    assert told["ORIGINAL_SIZE"].tolist() == [[10, 4]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_turned_as_its_exif_data_says(orientation: int, form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if form == "WEBP" else {"quality": 100, "subsampling": 0} if form == "JPEG" else {}
    file = encoded(noise(24, 16), form, exif=exif, **options)

    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file))))
    as_stored = np.asarray(Image.open(io.BytesIO(file)))

    np.testing.assert_array_equal(pixels(instance(DataType.UINT8, layout="NHWC"), file)[0], upright)
    np.testing.assert_array_equal(
        pixels(instance(DataType.UINT8, layout="NHWC", exif_orientation="false"), file)[0], as_stored
    )


def test_sizes_are_those_of_the_upright_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = encoded(Image.new("RGB", (64, 32)), "JPEG", exif=exif)

    told = arrays(instance(resize="letterbox", size="32").execute([request(file)]).results[0])

    assert told["ORIGINAL_SIZE"].tolist() == [[32, 64]]
    assert told["PADDING"].tolist() == [[8, 0]]


def test_broken_exif_data_does_not_matter() -> None:
    whole = encoded(noise(8, 8), "JPEG")
    file = whole[:2] + b"\xff\xe1\x00\x0eExif\x00\x00junk!!" + whole[2:]

    assert pixels(instance(crop="8"), file).shape == (1, 3, 8, 8)


def gray_16() -> Image.Image:
    return Image.fromarray((np.arange(256).reshape(16, 16) << 8).astype(np.uint16))


@pytest.mark.parametrize(
    ("file", "first"),
    [
        (encoded(Image.new("L", (4, 4), 90)), [90, 90, 90]),
        (encoded(Image.new("1", (4, 4), 1)), [255, 255, 255]),
        (encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 0))), [10, 20, 30]),
        (encoded(Image.new("LA", (4, 4), (10, 128))), [10, 10, 10]),
        (encoded(Image.new("RGB", (4, 4), (200, 0, 0)).quantize(4)), [200, 0, 0]),
        (encoded(Image.new("RGB", (4, 4), (200, 0, 0)).quantize(4), transparency=b"\0\0\0\0"), [200, 0, 0]),
        (encoded(Image.new("RGB", (4, 4), (9, 9, 9)), transparency=(9, 9, 9)), [9, 9, 9]),
        (encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), [254, 0, 0]),
        (encoded(Image.fromarray(np.full((4, 4), 0x8001, np.uint16))), [128, 128, 128]),
        (encoded(Image.new("RGB", (4, 4), (1, 2, 3)), "BMP"), [1, 2, 3]),
        (encoded(Image.new("RGB", (4, 4), (255, 0, 0)), "GIF"), [255, 0, 0]),
        (encoded(Image.new("RGBA", (4, 4), (1, 2, 3, 0)), "WEBP", lossless=True, exact=True), [1, 2, 3]),
    ],
    ids=["gray", "bilevel", "alpha", "gray-alpha", "palette", "palette-alpha", "color-key", "CMYK", "16-bit", "BMP",
         "GIF", "WebP-alpha"],
)  # fmt: skip
def test_images_of_every_mode_become_rgb(file: bytes, first: list[int]) -> None:
    assert pixels(instance(DataType.UINT8), file)[0, :, 0, 0].tolist() == pytest.approx(first, abs=1)


def test_16_bits_of_gray_keep_their_upper_half() -> None:
    array = pixels(instance(DataType.UINT8, color="GRAY"), encoded(gray_16()))[0, 0]

    assert array.reshape(-1).tolist() == list(range(256))


def test_transparent_pixels_show_the_background_if_one_is_given() -> None:
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))

    shown = pixels(instance(DataType.UINT8, background="255,254,253"), encoded(image))[0]

    assert shown[:, 0, 0].tolist() == [255, 254, 253]
    assert shown[:, 0, 1].tolist() == [10, 20, 30]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_counts(form: str) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("white", "black")]
    file = encoded(frames[0], form, save_all=True, append_images=frames[1:])

    assert pixels(instance(DataType.UINT8), file).min() > 250


def test_scaled_decoding_differs_little_from_decoding_in_full() -> None:
    large = Image.open(io.BytesIO(photo())).resize((2560, 1708), Image.Resampling.BICUBIC)
    file = encoded(large, "JPEG", quality=90)

    full, scaled = (pixels(instance(scaled_decode=flag, **CLASSIFIER), file)[0] for flag in ("false", "true"))
    difference = np.abs(full - scaled) * STD[:, None, None] * 255

    assert 0 < difference.mean() < 1.5


def test_scaled_decoding_of_a_turned_image(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = encoded(Image.new("RGB", (1600, 400), "white"), "JPEG", exif=exif)
    decoded = []
    draft = JpegImagePlugin.JpegImageFile.draft

    def drafting(self: JpegImagePlugin.JpegImageFile, *arguments: Any) -> object:
        result = draft(self, *arguments)
        decoded.append(self.size)
        return result

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", drafting)
    shown = pixels(instance(resize="stretch", size="100x200", scaled_decode="true"), file)

    assert decoded == [(800, 200)]  # upright, it is 200 x 800: twice the width of the output
    assert shown.shape == (1, 3, 200, 100)


@pytest.mark.parametrize(
    ("file", "message", "hint"),
    [
        (b"", "expected a file of format JPEG, PNG, WEBP, GIF or BMP, got nothing", "send the bytes"),
        (b"http://x/cat.jpg", "got 16 bytes that begin with b'http://x'", "not its path, its URL or base64"),
        (b"II*\0" + b"\0" * 30, "got 34 bytes that begin with", "send the bytes"),
        (photo()[:1000], "the header of the file cannot be read: Truncated File Read", "damaged"),
        (photo()[:100_000], "expected a whole JPEG file", "damaged or cut short"),
        (encoded(noise(64, 64))[:4000], "expected a whole PNG file", "damaged or cut short"),
        (encoded(noise(64, 64), "WEBP")[:900], "the header of the file cannot be read", "damaged"),
        (b"\xff\xd8\xff\xe0" + b"\0" * 100, "", ""),
    ],
    ids=["empty", "URL", "TIFF", "header-only", "half", "half-PNG", "half-WebP", "junk"],
)  # fmt: skip
def test_a_bad_file_is_refused_with_the_reason(file: bytes, message: str, hint: str) -> None:
    error = failure(instance(**CLASSIFIER), file)

    assert error.code is Code.INVALID_ARG
    assert error.message.startswith("input 'IMAGE': ")
    assert message in error.message
    assert hint in error.hint


def test_a_damaged_row_is_named_and_fails_its_own_request_only() -> None:
    model = instance(**CLASSIFIER)
    good, bad = request(photo()), request(photo(), b"x", photo())

    first, failed, last = model.execute([good, bad, good]).results

    assert isinstance(failed, ServingError)
    assert failed.message.startswith("input 'IMAGE'[1]: expected a file")
    for result in (first, last):
        assert np.abs(arrays(result)["PIXELS"][0] - classifier_input(photo())).max() < 0.02


def png_of_size(width: int, height: int) -> bytes:
    small = encoded(Image.new("L", (1, 1)))
    return small[:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + crc(small, width, height) + small[33:]


def crc(png: bytes, width: int, height: int) -> bytes:
    import zlib

    header = png[12:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + png[24:29]
    return png[24:29] + zlib.crc32(header).to_bytes(4, "big")


@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (200_000, 200_000), (9_500, 9_500)])
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(width: int, height: int) -> None:
    error = failure(instance(**CLASSIFIER), png_of_size(width, height))

    assert error.code is Code.INVALID_ARG
    assert "expected an image of at most 50000000 pixels" in error.message


def test_the_limit_of_pixels_can_be_set() -> None:
    model = instance(max_pixels="100", crop="8")

    assert pixels(model, encoded(noise(10, 10))).shape == (1, 3, 8, 8)
    error = failure(model, encoded(noise(101, 1)))
    assert "at most 100 pixels, got 101 x 1" in error.message
    assert "max_pixels" in error.hint


def test_a_file_of_too_many_bytes_is_refused() -> None:
    error = failure(instance(max_bytes="100", **CLASSIFIER), photo())

    assert "expected a file of at most 100 bytes, got 196653" in error.message
    assert "max_bytes" in error.hint


@pytest.mark.parametrize("parameters", [{"resize": "shorter_side", "size": "256"}, CLASSIFIER | {"exact": "true"}])
def test_a_strip_that_would_become_huge_is_refused(parameters: dict[str, str]) -> None:
    error = failure(instance(**parameters), encoded(Image.new("L", (60_000, 4))))

    assert "at most 50000000 pixels while it is resized, got one of 60000 x 4 to be 3840000 x 256" in error.message


def test_a_strip_whose_center_is_cropped_takes_little() -> None:
    assert pixels(instance(**CLASSIFIER), encoded(Image.new("L", (60_000, 4)))).shape == (1, 3, 224, 224)


def test_too_little_memory_fails_the_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = instance(**CLASSIFIER)

    def no_memory(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "convert", no_memory)
    error = failure(model, encoded(Image.new("L", (4, 4))))

    assert error.code is Code.UNAVAILABLE


def test_the_images_of_a_batch_are_decoded_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = instance(threads="3", **CLASSIFIER)
    together = threading.Barrier(3, timeout=200)
    render = model._renderer.render
    names = set()

    def meeting(data: bytes, place: str, out: Array | None) -> object:
        together.wait()
        names.add(threading.current_thread().name)
        return render(data, place, out)

    monkeypatch.setattr(model._renderer, "render", meeting)

    assert pixels(model, photo(), photo(), photo()).shape[0] == 3
    assert len(names) == 3
    model.close()


def test_one_thread_does_one_image_after_the_other() -> None:
    assert pixels(instance(threads="1", **CLASSIFIER), photo(), photo()).shape[0] == 2


def test_a_model_has_two_instances_unless_it_says_otherwise() -> None:
    config = ModelConfig(name="m", backend="image", parameters=CLASSIFIER)
    four = replace(config, instance_group=(InstanceGroup(count=4),))

    assert [group.count for group in completed(config).config.instance_group] == [2]
    assert [group.count for group in completed(four).config.instance_group] == [4]


def test_a_batch_of_one_instance_may_use_the_threads_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(completed(ModelConfig(name="m", backend="image", parameters=CLASSIFIER)).config, threads=1)
    together = threading.Barrier(2, timeout=200)
    render = model._renderer.render

    def meeting(data: bytes, place: str, out: Array | None) -> object:
        together.wait()
        return render(data, place, out)

    monkeypatch.setattr(model._renderer, "render", meeting)

    assert pixels(model, photo(), photo()).shape[0] == 2


def test_a_batch_is_one_array_and_requests_get_views_of_it() -> None:
    model = instance(**CLASSIFIER)

    first, second = model.execute([request(photo()), request(photo(), photo())]).results

    one, two = arrays(first)["PIXELS"], arrays(second)["PIXELS"]
    assert one.base is two.base
    assert one.base is not None
    assert one.base.shape == (3, 3, 224, 224)


def test_raw_bytes_are_one_file() -> None:
    config = ModelConfig(
        name="m", backend="image", parameters=CLASSIFIER, input=(ModelInput("FILE", DataType.UINT8, dims=(-1,)),)
    )
    completion = completed(config)
    array = np.frombuffer(photo(), np.uint8)

    [result] = (
        loaded(completion.config).execute([InferRequest("m", {"FILE": Tensor("FILE", DataType.UINT8, array)})]).results
    )

    assert completion.config.max_batch_size == 0
    assert arrays(result)["PIXELS"].shape == (3, 224, 224)


def test_a_reshape_gives_a_single_image_a_batch_dimension() -> None:
    config = ModelConfig(
        name="m",
        backend="image",
        input=(ModelInput("IMAGE", DataType.BYTES, dims=(1,)),),
        output=(ModelOutput("PIXELS", DataType.FP32, (1, 3, -1, -1), reshape=Reshape((3, -1, -1))),),
    )
    asked = InferRequest("m", {"IMAGE": Tensor("IMAGE", DataType.BYTES, request(photo()).inputs["IMAGE"].array[0])})

    [result] = loaded(config).execute([asked]).results

    assert arrays(result)["PIXELS"].shape == (1, 3, 427, 640)


def test_inputs_and_outputs_follow_from_the_parameters() -> None:
    completion = completed(ModelConfig(name="m", backend="image", parameters={"resize": "letterbox", "size": "640"}))

    assert completion.config.max_batch_size == 4
    assert completion.config.dynamic_batching is not None
    assert completion.config.input == (ModelInput("IMAGE", DataType.BYTES, dims=(1,)),)
    assert [(o.name, o.data_type, o.dims) for o in completion.config.output] == [
        ("PIXELS", DataType.FP32, (3, 640, 640)),
        ("SCALE", DataType.FP32, (2,)),
        ("PADDING", DataType.INT32, (2,)),
        ("ORIGINAL_SIZE", DataType.INT32, (2,)),
    ]
    assert "output 'PIXELS': FP32 [3, 640, 640], from the parameters" in completion.notes


def test_a_batch_may_be_of_one() -> None:
    config = ModelConfig(name="m", backend="image", max_batch_size=1, parameters=CLASSIFIER)

    assert pixels(loaded(completed(config).config), photo()).shape == (1, 3, 224, 224)


def test_images_of_different_sizes_do_not_batch() -> None:
    completion = completed(ModelConfig(name="m", backend="image"))

    assert completion.config.max_batch_size == 0
    assert completion.config.output[0].dims == (3, -1, -1)


IMAGE = ModelInput("IMAGE", DataType.BYTES, dims=(1,))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(max_batch_size=8), "max_batch_size: a batch needs images of one size"),
        (ModelConfig(parameters={"croop": "224"}), "did you mean 'crop'?"),
        (
            ModelConfig(max_batch_size=8, parameters=CLASSIFIER, input=(ModelInput("I", DataType.UINT8, dims=(-1,)),)),
            "max_batch_size: an input of TYPE_UINT8 is the bytes of one file",
        ),
        (
            ModelConfig(parameters=CLASSIFIER, input=(ModelInput("I", DataType.FP32, dims=(1,)),)),
            "configuration expects datatype TYPE_FP32 for input 'I', model provides TYPE_STRING",
        ),
        (
            ModelConfig(parameters=CLASSIFIER, input=(IMAGE, ModelInput("I", DataType.BYTES, dims=(1,)))),
            "unexpected inference input 'I'",
        ),
        (
            ModelConfig(parameters=CLASSIFIER, output=(ModelOutput("P", DataType.FP32, (224, 224, 3)),)),
            "output[0].dims: the parameters make [3, 224, 224] of an image (NCHW), got [224, 224, 3]",
        ),
        (
            ModelConfig(output=(ModelOutput("P", DataType.FP32, (3, 480, 640)),)),
            "output[0].dims: the parameters make [3, -1, -1] of an image (NCHW), got [3, 480, 640]",
        ),
        (
            ModelConfig(parameters=CLASSIFIER, output=(ModelOutput("P", DataType.INT64, (3, 224, 224)),)),
            "output[0].data_type: pixels are one of TYPE_FP32, TYPE_FP16, TYPE_UINT8, got TYPE_INT64",
        ),
        (
            ModelConfig(parameters=CLASSIFIER, instance_group=(InstanceGroup(kind=InstanceKind.KIND_GPU),)),
            "the image backend has no instances of KIND_GPU (hint: images are decoded on the CPU",
        ),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_is_refused(config: ModelConfig, message: str) -> None:
    with pytest.raises(ServingError) as caught:
        loaded(completed(replace(config, name="m", backend="image")).config)

    assert message in str(caught.value)
