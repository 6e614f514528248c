"""LEAF's Shakespeare: predict the next character in the lines of a role (arXiv 1812.01097).

Each file has the form `{"users": [u, ...], "num_samples": [n, ...], "user_data": {u: {"x": [80
characters, ...], "y": [character, ...]}}}`. A user is a role in a play. Each role is a natural
client.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from fedexp.data.leaf import find_split_files, read_users, require_valid
from fedexp.data.text import LabelledTexts, TextSource, add_special_words
from fedexp.data.types import TextData

# The characters that inputs and labels can have, in the order of LEAF's language_utils.py.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
KIND = "Shakespeare"
COMMAND = "preprocess.sh -s niid --sf 1.0 -k 0 -t sample --tf 0.8"
# maps each role to its texts and to the character that follows each text
Users = dict[str, tuple[list[str], list[str]]]


class Shakespeare(TextSource):
    """LEAF's Shakespeare, read from `<data_dir>/shakespeare/{train,test}/*.json`.

    Each role is a natural client (see `Data.owners`). Roles are numbered in alphabetical order.
    """

    max_words: int = len(LETTERS)
    vocabulary: str | None = None
    vectors: str | None = None

    def read(self, length: int) -> LabelledTexts:
        train, test = (pool_roles(self._users[split], length) for split in ("train", "test"))
        return LabelledTexts(train[0], test[0], train[1], test[1], tuple(LETTERS))

    def load(self, like: TextData | None = None) -> TextData:
        sizes = [len(texts) for _, (texts, _) in sorted(self._users["train"].items())]
        return replace(super().load(like), owners=np.repeat(np.arange(len(sizes)), sizes))

    def split_files(self, split: str) -> list[Path]:
        return find_split_files(Path(self.data_dir, self.name, split), KIND, COMMAND)

    @property
    def paths(self) -> Sequence[Path]:
        return [*self.split_files("train"), *self.split_files("test")]

    @cached_property
    def _users(self) -> dict[str, Users]:
        return {s: read_users(self.split_files(s), check_samples, KIND) for s in ("train", "test")}

    def _vocabulary(self, texts: Sequence[str]) -> tuple[tuple[str, ...], torch.Tensor | None]:
        return add_special_words(tuple(LETTERS)), None


def check_samples(x: list[str], y: list[str]) -> tuple[list[str], list[str]]:
    """Check a role's texts x and next characters y, and return them unchanged.

    Raises ValueError if they are invalid.
    """
    require_valid(
        len(x) == len(y),
        f"x and y must have the same length, but there are {len(x)} texts and {len(y)} characters",
    )
    require_valid(all(type(text) is str for text in x), "x must contain only texts")
    require_valid(
        all(type(each) is str and len(each) == 1 and each in LETTERS for each in y),
        "y must contain only single characters of LEAF's alphabet",
    )
    return x, y


def pool_roles(users: Users, length: int) -> tuple[list[str], list[int]]:
    """Return the texts of all roles, sorted by role, and the labels.

    Each text is cut to its last `length` characters. The label of a text is the number of the next
    character in LETTERS.
    """
    pairs = [users[role] for role in sorted(users)]
    texts = [text[-length:] for x, _ in pairs for text in x]
    return texts, [LETTERS.index(character) for _, y in pairs for character in y]
