"""Images of every mode of Pillow, by file where a format can hold it: scaled by their own depth, or
refused."""

import io

import numpy as np
import pytest
from PIL import Image, ImageMode

from fedexp.core.errors import ConfigError
from fedexp.data import cache
from fedexp.data.image_files import _pixels, eight_bits, with_mode

# A ramp of 8-bit grey, and what each pixel must come out as within the rounding of a conversion of
# colours.
RAMP = np.array([[0, 64], [128, 255]], np.uint8)
GREY = Image.fromarray(RAMP)
COLOUR = Image.merge("RGB", [GREY] * 3)


def opaque(mode):
    return COLOUR.convert("RGBA").convert(mode)


# mode -> (image, suffixes of the formats that hold it as it is)
MODES = {
    "1": (
        Image.fromarray(np.where(RAMP > 100, 255, 0).astype(np.uint8)).convert("1"),
        ("png", "tif", "bmp"),
    ),
    "L": (GREY, ("png", "tif", "bmp", "pgm")),
    "P": (COLOUR.quantize(4), ("png", "tif", "gif", "bmp")),
    "LA": (GREY.convert("LA"), ("png", "tif")),
    "PA": (GREY.convert("LA").convert("PA"), ("tif",)),
    "RGB": (COLOUR, ("png", "tif", "bmp", "ppm", "webp")),
    "RGBA": (opaque("RGBA"), ("png", "tif", "webp")),
    "RGBX": (COLOUR.convert("RGBX"), ("tif",)),
    "CMYK": (COLOUR.convert("CMYK"), ("tif", "jpg")),
    "YCbCr": (COLOUR.convert("YCbCr"), ("tif",)),
    "LAB": (COLOUR.convert("LAB"), ("tif",)),
    "HSV": (COLOUR.convert("HSV"), ()),
    "La": (GREY.convert("LA").convert("La"), ()),
    "RGBa": (opaque("RGBa"), ()),
}


def of_16_bits(mode, kind):
    values = (RAMP.astype(np.int64) * 257).astype(kind)  # 255 becomes 65535
    return Image.frombytes(mode, (2, 2), values.tobytes())


MODES |= {
    "I;16": (of_16_bits("I;16", "<u2"), ("png", "tif")),
    "I;16L": (of_16_bits("I;16L", "<u2"), ()),
    "I;16B": (of_16_bits("I;16B", ">u2"), ("tif",)),
    "I;16N": (of_16_bits("I;16N", "=u2"), ()),
}
REFUSED = {
    "I": (Image.fromarray(RAMP.astype(np.int32) * 2**16), ("tif",)),
    "F": (Image.fromarray(RAMP.astype(np.float32) / 255), ("tif",)),
}
BEST = {"webp": {"lossless": True}, "jpg": {"quality": 100}}  # what else loses most
FILES = [(mode, suffix) for mode, (_, suffixes) in MODES.items() for suffix in suffixes]


def expected(mode):
    return np.where(RAMP > 100, 255, 0) if mode == "1" else RAMP


def test_no_mode_is_forgotten():
    ImageMode.getmode("L")  # fills the table of modes
    modes = {
        "1",
        "L",
        "I",
        "F",
        "P",
        "RGB",
        "RGBX",
        "RGBA",
        "CMYK",
        "YCbCr",
        "LAB",
        "HSV",
        "RGBa",
        "LA",
        "La",
        "PA",
    }
    modes |= {"I;16", "I;16L", "I;16B", "I;16N"}
    assert set(Image._MODEINFO if hasattr(Image, "_MODEINFO") else Image.MODES) <= modes
    assert modes == MODES.keys() | REFUSED.keys()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("mode", "suffix"), FILES)
def test_a_file_of_each_mode(mode, suffix, channels, tmp_path):
    """RGBX and others may be opened as a mode beside it; what counts is the pixels."""
    path = tmp_path / f"image.{suffix}"
    MODES[mode][0].save(path, **BEST.get(suffix, {}))
    pixels = _pixels(str(path), channels, None)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (2, 2, channels))
    tolerance = {"LAB": 3, "YCbCr": 2, "jpg": 4}.get(suffix if suffix == "jpg" else mode, 1)
    for channel in range(channels):
        np.testing.assert_allclose(pixels[..., channel].astype(int), expected(mode), atol=tolerance)


@pytest.mark.parametrize("channels", ["L", "RGB"])
@pytest.mark.parametrize("mode", MODES)
def test_an_image_of_each_mode(mode, channels):
    pixels = np.asarray(with_mode(eight_bits(MODES[mode][0]), channels)).reshape(2, 2, -1)
    assert pixels.dtype == np.uint8
    for channel in range(pixels.shape[-1]):
        np.testing.assert_allclose(pixels[..., channel].astype(int), expected(mode), atol=4)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", REFUSED)
def test_pixels_without_a_known_white_are_refused(mode, channels, tmp_path):
    image, (suffix,) = REFUSED[mode]
    image.save(path := tmp_path / f"image.{suffix}")
    with pytest.raises(
        ConfigError, match=rf"image\.{suffix}: its pixels are .* save it with 8 or 16 bits"
    ):
        _pixels(str(path), channels, None)
    with pytest.raises(ConfigError, match="of which no file says what is white"):
        eight_bits(image)


def test_16_bits_with_a_sign_are_refused(tmp_path):
    Image.fromarray(RAMP.astype(np.int32)).save(
        path := tmp_path / "image.tif", tiffinfo={258: 16, 339: 2}
    )
    with pytest.raises(ConfigError, match=r"image\.tif: "):
        _pixels(str(path), 1, None)


def test_16_bits_of_a_pgm_file(tmp_path):
    """Pillow opens it as I; a file with a lower maximum is scaled by Pillow itself: 1023 is white
    here, 512 in the middle."""
    path = tmp_path / "image.pgm"
    path.write_bytes(b"P5 2 2 65535\n" + (RAMP.astype(np.int64) * 257).astype(">u2").tobytes())
    np.testing.assert_array_equal(_pixels(str(path), 1, None)[..., 0], RAMP)
    path.write_bytes(b"P5 2 1 1023\n" + np.array([1023, 512], ">u2").tobytes())
    np.testing.assert_allclose(_pixels(str(path), 1, None)[0, :, 0].astype(int), [255, 128], atol=1)


def test_16_bits_of_a_tiff_whose_zero_is_white(tmp_path):
    buffer = io.BytesIO()
    MODES["I;16"][0].save(buffer, "tiff", tiffinfo={262: 0})
    (tmp_path / "image.tif").write_bytes(buffer.getvalue())
    with Image.open(tmp_path / "image.tif") as image:
        assert image.tag_v2[262] == 0
    np.testing.assert_array_equal(_pixels(str(tmp_path / "image.tif"), 1, None)[..., 0], 255 - RAMP)


def test_colours_of_16_bits_agree_with_greys(tmp_path):
    """A PNG of 16-bit colours, written chunk by chunk since Pillow writes none: its pixels equal
    those of the grey."""
    import struct
    import zlib

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    wide = np.repeat((RAMP.astype(np.int64) * 257).astype(">u2")[..., None], 3, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in wide)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0))
    path = tmp_path / "image.png"
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    for channel in range(3):
        np.testing.assert_array_equal(_pixels(str(path), 3, None)[..., channel], RAMP)


def test_what_older_versions_decoded_is_not_used():
    """Format 1 held images of 16 bits that were clipped."""
    assert cache.FORMAT >= 2
