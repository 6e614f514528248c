"""Damaged files in every format: one message names the file or the data set, and no other error is
raised. Each format is damaged in known ways, and then at random (more often in slow tests).
"""

import gzip
import io
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from fedexp.core.errors import ConfigError
from fedexp.core.npz import load_npz
from fedexp.data.image_files import list_images
from fedexp.data.partition_file import read_clients
from fedexp.data.partitioned import Partition
from fedexp.data.text import read_vectors, read_vocabulary
from fedexp.data.text_files import read_texts
from fedexp.data.torchvision_files import read_idx
from test_datasets import idx_bytes, leaf_json, load, no_network, pixels, write_leaf, write_tree

__all__ = ["no_network"]  # a fixture


def picture(suffix: str, side: int = 16) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(0, side, side, 3)).save(buffer, suffix)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a png file that claims this size and contains one pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(4)))
        + chunk(b"IEND", b"")
    )


def npz(**arrays: object) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


# ---- known damage ----


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.png", picture("png")[:-40]),
        ("cut.jpg", picture("jpeg")[:200]),
        ("cut.bmp", picture("bmp")[:-40]),
        ("empty.png", b""),
        ("text.jpg", b"<html>not found</html>"),
        ("bomb.png", png_header(60_000, 60_000)),
        ("short.png", png_header(4, 4)),
    ],
)
def test_damaged_images_are_rejected(name, content, tmp_path):
    write_tree(tmp_path / "images", {"a": 1}, side=16)
    (tmp_path / "images" / "train" / "a" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: this image cannot be read") as error:
        load("image_folder", tmp_path, f"dataset.root='{tmp_path / 'images'}'")
    assert "\n" not in str(error.value)


GOOD_LABELS = idx_bytes(np.array([0, 1, 9], np.uint8))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01" + GOOD_LABELS[1:],  # not two zero bytes
        b"\0\0\x0d" + GOOD_LABELS[3:],  # not uint8
        GOOD_LABELS[:-1],
        GOOD_LABELS + b"\0",
        idx_bytes(np.zeros((3, 1), np.uint8)),  # another rank
        b"\0\0\x08\x01\xff\xff\xff\xff\0\0\0",  # a negative size
        gzip.compress(GOOD_LABELS, mtime=0),
    ],
)
def test_damaged_idx_files_are_rejected(content, tmp_path):
    (tmp_path / "labels").write_bytes(content)
    with pytest.raises(ConfigError, match="labels: is corrupt"):
        read_idx(tmp_path / "labels", 1)


def test_idx_files_of_wrong_rank_are_rejected(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte").write_bytes(idx_bytes(pixels(1, 3, 5, 4)))
    with pytest.raises(ConfigError, match="train-labels-idx1-ubyte: is corrupt"):
        load("mnist", tmp_path)


def test_truncated_gz_file_is_not_unpacked(no_network, tmp_path):
    """Its md5 is wrong. The file is kept, and the message names the correct md5."""
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(
        gzip.compress(idx_bytes(pixels(1, 3, 5, 4)))[:-9]
    )
    with pytest.raises(
        ConfigError, match=r"train-images-idx3-ubyte\.gz  \(md5 f68b3c2dcbeaaa9fbdd348bbdeb94873\)"
    ):
        load("mnist", tmp_path)
    assert [path.name for path in folder.iterdir()] == ["train-images-idx3-ubyte.gz"]


def test_a_download_that_fails_leaves_no_folder(no_network, tmp_path):
    for name in ("mnist", "cifar10", "cinic10", "tiny_imagenet", "caltech256"):
        with pytest.raises(ConfigError, match="could not be downloaded"):
            load(name, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


X, WRITER = (pixels(0, 2, 784) / 255).tolist(), leaf_json({"f": (pixels(0, 1, 28, 28), [0])})


@pytest.mark.parametrize(
    "sample",
    [
        {"x": X},
        {"x": X, "y": [1]},
        {"x": [X[0], X[1][:-1]], "y": [1, 2]},
        {"x": [[float("nan")] * 784], "y": [1]},
        {"x": [[2.0] * 784], "y": [1]},
        {"x": [[None] * 784], "y": [1]},
        {"x": X, "y": [1, 62]},
        {"x": X, "y": [1, -1]},
        {"x": X, "y": [1, 1.5]},
        {"x": X, "y": [1, True]},
        {"x": X, "y": [1, 10**30]},
        {"x": X, "y": None},
        [],
        None,
    ],
)
def test_invalid_leaf_samples_are_rejected(sample, tmp_path):
    write_leaf(tmp_path / "femnist" / "train", all_data_7=json.dumps({"user_data": {"f": sample}}))
    write_leaf(tmp_path / "femnist" / "test", all_data_0=WRITER)
    with pytest.raises(ConfigError, match=r"all_data_7\.json: is not a LEAF json file"):
        load("femnist", tmp_path)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "\udcff", "3", '{"user_data": 3}', '{"user_data": {"f": {"x": [[', "null"],
)
def test_files_not_from_leaf_are_rejected(text, tmp_path):
    write_leaf(tmp_path / "femnist" / "test", all_data_0=WRITER)
    (tmp_path / "femnist" / "train").mkdir()
    (tmp_path / "femnist" / "train" / "all_data_7.json").write_bytes(
        text.encode("utf-8", "surrogateescape")
    )
    with pytest.raises(ConfigError, match=r"all_data_7\.json: is not a LEAF json file"):
        load("femnist", tmp_path)


@pytest.mark.parametrize(
    "annotations", [b"", b"\xff\xfe", b"x.JPEG\tnowhere\n", b"x.JPEG\n", b"gone.JPEG\tn01\t0\n"]
)
def test_invalid_tiny_imagenet_annotations_are_rejected(annotations, tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    write_tree(root, {"n01/images": 1}, splits=("train",))
    (root / "val" / "images").mkdir(parents=True)
    (root / "val" / "val_annotations.txt").write_bytes(annotations)
    with pytest.raises(ConfigError, match=r"val_annotations\.txt"):
        load("tiny_imagenet", tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK",
        npz(),
        npz(embeddings=np.array([object()], object)),  # would be unpickled
        npz(embeddings=np.zeros(3)),
        npz(embeddings=np.zeros((2, 2), int)),
        npz(embeddings=np.zeros((0, 3))),
        npz(embeddings=np.full((2, 2), np.nan)),
        npz(a=np.zeros((2, 2)), b=np.zeros((2, 2))),
        npz(embeddings=np.zeros((2, 2)))[:-60],
    ],
)
def test_invalid_vectors_are_rejected(content, tmp_path):
    path = tmp_path / "vectors.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"vectors\.npz: "):
        read_vectors(path)


def test_an_array_that_claims_to_be_huge_is_rejected(tmp_path):
    """The file has 100 bytes, and no memory is allocated for the array."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (2**60,)}
    )
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.npz", "w") as packed:
        packed.writestr("embeddings.npy", header.getvalue())
    with pytest.raises(ConfigError, match=r"x\.npz: cannot be read"):
        load_npz(tmp_path / "x.npz")


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"a": 1.0}', '{"a": 1}', '{"a": 0, "b": 0}', "{}", "[" * 100_000, '{"a": true}'],
)
def test_invalid_vocabularies_are_rejected(text, tmp_path):
    (tmp_path / "vocab.json").write_text(text)
    with pytest.raises(ConfigError, match=r"vocab\.json: "):
        read_vocabulary(tmp_path / "vocab.json")


@pytest.mark.parametrize(
    "text",
    [b"", b"label\n1\n", b"title,label\na\n", b'title,label\n"a', b"\xff", b"title,title,x\n"],
)
def test_invalid_csv_texts_are_rejected(text, tmp_path):
    (tmp_path / "train.csv").write_bytes(text)
    with pytest.raises(ConfigError, match=r"train\.csv"):
        read_texts([tmp_path / "train.csv"], 8)


# ---- random damage ----

CSV = b'title,body,label\n"a ""b""",c,1\nd,"e\nf",0\n'


def read_a_saved_partition(path: Path) -> None:
    Partition.load(path)
    read_clients(path)


def saved() -> bytes:
    labels = np.arange(12) % 3
    made = Partition.build([np.arange(6), np.arange(6, 12)], labels, 3, {"scheme": "x"})
    arrays = {"indices": np.concatenate(made.parts), "sizes": made.sizes, "counts": made.counts}
    return npz(**arrays, hash=np.array(made.hash), info=np.array(json.dumps(made.info)))


def read_a_picture(path: Path) -> None:
    from fedexp.data.cache import SourceFile
    from fedexp.data.image_files import Form, decode

    decode([SourceFile.of(path)], Form(3, 8))


def read_a_leaf_file(path: Path) -> None:
    from fedexp.data.leaf import read_femnist

    read_femnist([path], [path])


FORMATS: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "x.png": (picture("png"), read_a_picture),
    "x.jpg": (picture("jpeg"), read_a_picture),
    "x.gif": (picture("gif"), read_a_picture),
    "leaf.json": (WRITER.encode(), read_a_leaf_file),
    "texts.csv": (CSV, lambda path: read_texts([path], 8)),
    "texts.txt": (b"a text\t1\nanother\t0\n", lambda path: read_texts([path], 8)),
    "vocab.json": (b'{"a": 0, "b": 1}', read_vocabulary),
    "vectors.npz": (npz(embeddings=np.ones((3, 2))), read_vectors),
    "saved.npz": (saved(), read_a_saved_partition),
    "clients.npz": (npz(**{"0": np.arange(3), "1": np.arange(3, 5)}), read_clients),
    "clients.json": (b'{"0": [1, 2], "1": [3]}', read_clients),
}


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """Change, remove or add some bytes, or truncate the content."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(changed)))
        changed[at : at + draw(st.integers(0, 6))] = draw(st.binary(max_size=6))
    return bytes(changed[: draw(st.one_of(st.just(len(changed)), st.integers(0, len(changed))))])


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PIL about odd metadata
@pytest.mark.parametrize("number", [25, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_randomly_damaged_files_are_rejected_or_read(name, number, tmp_path):
    content, read = FORMATS[name]
    path = tmp_path / name
    path.write_bytes(content)
    read(path)  # whole it is read
    messages: list[str] = []

    @hypothesis.settings(max_examples=number, deadline=None, derandomize=True, database=None)
    @hypothesis.given(damaged(content))
    def try_one(broken: bytes) -> None:
        path.write_bytes(broken)
        try:
            read(path)
        except ConfigError as error:
            messages.append(str(error))

    try_one()
    assert [message for message in messages if name not in message] == []
    assert messages


# ---- what a folder may hold beside files


def images_with(folder: Path, name: str) -> Path:
    (folder / "a").mkdir()
    Image.new("L", (4, 4)).save(folder / "a" / "0.png")
    return folder / "a" / name


@pytest.mark.parametrize(
    "kind", ["a link to nothing", "a link to itself", "a pipe", "a circle of folders"]
)
def test_pipes_and_broken_links_are_rejected(kind, tmp_path):
    """Reading a pipe would block, and a circular link would repeat a folder 40 times."""
    path = images_with(tmp_path, "loop" if kind == "a circle of folders" else "1.png")
    match kind:
        case "a link to nothing":
            path.symlink_to("nowhere")
        case "a link to itself":
            path.symlink_to(path)
        case "a pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        list_images(tmp_path / "a")


def test_links_to_images_and_folders_are_followed(tmp_path):
    path = images_with(tmp_path, "1.png")
    path.symlink_to("0.png")
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "a" / "0.png", tmp_path / "other")
    for name in ("first", "second"):
        (tmp_path / "a" / name).symlink_to(tmp_path / "other")
    found = [file.path for file in list_images(tmp_path / "a")]
    assert [Path(each).relative_to(tmp_path / "a").as_posix() for each in found] == [
        *("0.png", "1.png", "first/0.png", "second/0.png")
    ]
