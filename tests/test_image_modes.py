"""Image files in each mode of Pillow that a format can store."""

import io

import numpy as np
import pytest
from PIL import Image

from fedexp.core.errors import ConfigError
from fedexp.data.image_files import Form, _read_image

# A ramp of 8-bit grey, and what each pixel must come out as within the rounding of a conversion of
# colours.
RAMP = np.array([[0, 64], [128, 255]], np.uint8)
WIDE = RAMP.astype(np.int64) * 257  # 16 bits: 255 becomes 65535
GREY = Image.fromarray(RAMP)
COLOUR = Image.merge("RGB", [GREY] * 3)


# mode -> (image, suffixes of the formats that store it)
MODES = {
    "1": (Image.fromarray(RAMP > 100), ("png", "tif", "bmp")),
    "L": (GREY, ("png", "tif", "bmp", "pgm")),
    "P": (COLOUR.quantize(4), ("png", "tif", "gif", "bmp")),
    "RGB": (COLOUR, ("png", "tif", "bmp", "ppm", "webp")),
    "RGBA": (COLOUR.convert("RGBA"), ("png", "tif", "webp")),
    "CMYK": (COLOUR.convert("CMYK"), ("tif", "jpg")),
    "I;16": (Image.frombytes("I;16", (2, 2), WIDE.astype("<u2").tobytes()), ("png", "tif")),
    "I;16B": (Image.frombytes("I;16B", (2, 2), WIDE.astype(">u2").tobytes()), ("tif",)),
}
BEST = {"webp": {"lossless": True}, "jpg": {"quality": 100}}  # other formats are lossless
FILES = [(mode, suffix) for mode, (_, suffixes) in MODES.items() for suffix in suffixes]


def expected(mode):
    return np.where(RAMP > 100, 255, 0) if mode == "1" else RAMP


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("mode", "suffix"), FILES)
def test_image_modes_are_converted(mode, suffix, channels, tmp_path):
    path = tmp_path / f"image.{suffix}"
    MODES[mode][0].save(path, **BEST.get(suffix, {}))
    pixels = _read_image(str(path), Form(channels))
    assert (pixels.dtype, pixels.shape) == (np.uint8, (2, 2, channels))
    tolerance = 4 if suffix == "jpg" else 1
    for channel in range(channels):
        np.testing.assert_allclose(pixels[..., channel].astype(int), expected(mode), atol=tolerance)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(RAMP.astype(np.int32) * 2**16),
        Image.fromarray(RAMP.astype(np.float32) / 255),
    ],
)
def test_images_with_unknown_white_level_are_rejected(image, channels, tmp_path):
    image.save(path := tmp_path / "image.tif")
    with pytest.raises(ConfigError, match=r"image\.tif: .* save the image with 8 or 16 bits"):
        _read_image(str(path), Form(channels))


def test_16_bit_tiff_images_with_white_as_zero_are_inverted(tmp_path):
    buffer = io.BytesIO()
    MODES["I;16"][0].save(buffer, "tiff", tiffinfo={262: 0})
    (tmp_path / "image.tif").write_bytes(buffer.getvalue())
    with Image.open(tmp_path / "image.tif") as image:
        assert image.tag_v2[262] == 0
    np.testing.assert_array_equal(
        _read_image(str(tmp_path / "image.tif"), Form(1))[..., 0], 255 - RAMP
    )
