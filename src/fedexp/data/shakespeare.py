"""LEAF's Shakespeare: predict the next character in the lines of each role (arXiv 1812.01097).

One file is `{"users": [u, ...], "num_samples": [n, ...], "user_data": {u: {"x": [80 characters,
...], "y": [character, ...]}}}`. A user is a role in a play, and is a natural client.
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

# The characters of LEAF's language_utils.py in its order, for both inputs and labels.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
KIND = "Shakespeare"
COMMAND = "preprocess.sh -s niid --sf 1.0 -k 0 -t sample --tf 0.8"
Users = dict[str, tuple[list[str], list[str]]]  # role -> (texts, the character after each)


class Shakespeare(TextSource):
    """LEAF's `<data_dir>/shakespeare/{train,test}/*.json`.

    `owners` are the roles, sorted by name.
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
    """Return a role's examples after checking them.

    Raises ValueError if they are invalid.
    """
    require_valid(len(x) == len(y), f"{len(x)} texts but {len(y)} next characters")
    require_valid(all(type(text) is str for text in x), "x must contain texts")
    require_valid(
        all(type(each) is str and len(each) == 1 and each in LETTERS for each in y),
        "y must contain single characters of LEAF",
    )
    return x, y


def pool_roles(users: Users, length: int) -> tuple[list[str], list[int]]:
    """Return the last `length` characters of all texts, and the numbers of the characters after
    them, sorted by role.
    """
    pairs = [users[role] for role in sorted(users)]
    texts = [text[-length:] for x, _ in pairs for text in x]
    return texts, [LETTERS.index(character) for _, y in pairs for character in y]
