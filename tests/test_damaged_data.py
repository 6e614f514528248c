"""Damaged files in every format: one message names the file, and no other error is raised."""

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedexp.core.errors import ConfigError
from fedexp.data.cache import SourceFile
from fedexp.data.image_files import Form, decode
from fedexp.data.leaf import read_femnist
from fedexp.data.text import read_vectors, read_vocabulary
from fedexp.data.text_files import read_texts
from test_datasets import load, pixels, write_tree


def picture(suffix: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(0, 16, 16, 3)).save(buffer, suffix)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a png file that claims this size and contains one pixel."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(bytes(4))), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def npz(**arrays: object) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def sample(x: object, y: object) -> bytes:
    """Return a json file of LEAF with one user."""
    return json.dumps({"user_data": {"f": {"x": x, "y": y}}}).encode()


X = (pixels(0, 2, 784) / 255).tolist()
READERS: dict[str, Callable[[Path], object]] = {
    "image": lambda path: decode([SourceFile.of(path)], Form(3, 8)),
    "leaf.json": lambda path: read_femnist([path], [path]),
    "texts.csv": lambda path: read_texts([path], 8),
    "vocab.json": read_vocabulary,
    "vectors.npz": read_vectors,
}
DAMAGED: dict[str, list[bytes]] = {
    "image": [
        *(picture("png")[:-40], b"", b"<html>not found</html>", png_header(60_000, 60_000)),
    ],
    "leaf.json": [
        *(b"3", b"\xff", b"[" * 100_000, b'{"user_data": {"f": []}}'),
        *(sample(X, [1]), sample([X[0], X[1][:-1]], [1, 2])),
        *(sample([[value] * 784], [1]) for value in (float("nan"), 2.0)),
        *(sample(X, [1, label]) for label in (62, 1.5)),
    ],
    "texts.csv": [
        *(b"", b"title,label\na\n", b'title,label\n"a', b"\xff"),
    ],
    "vocab.json": [
        *(b"[]", b'{"a": 1.0}', b'{"a": 1}', b'{"a": 0, "b": 0}'),
    ],
    "vectors.npz": [
        npz(embeddings=np.zeros((2, 2)))[:-60],
        npz(embeddings=np.array([object()], object)),  # would be unpickled
        *(npz(embeddings=values) for values in (np.zeros(3), np.full((2, 2), np.nan))),
        npz(a=np.zeros((2, 2)), b=np.zeros((2, 2))),
    ],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, each) for name, every in DAMAGED.items() for each in every]
)
def test_damaged_files_are_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}\b") as error:
        READERS[name](tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("annotations", [b"", b"x.JPEG\tnowhere\n", b"x.JPEG\n"])
def test_invalid_tiny_imagenet_annotations_are_rejected(annotations, tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    write_tree(root, {"n01/images": 1}, splits=("train",))
    (root / "val" / "images").mkdir(parents=True)
    (root / "val" / "val_annotations.txt").write_bytes(annotations)
    with pytest.raises(ConfigError, match=r"val_annotations\.txt"):
        load("tiny_imagenet", tmp_path)


@pytest.mark.parametrize("target", ["nowhere", "1.png"])
def test_links_to_nothing_are_rejected(target, tmp_path):
    write_tree(tmp_path / "images", {"a": 1})
    (tmp_path / "images" / "train" / "a" / "1.png").symlink_to(target)
    with pytest.raises(ConfigError, match=r"train/a/1\.png: is a broken link"):
        load("image_folder", tmp_path, f"dataset.root='{tmp_path / 'images'}'")
