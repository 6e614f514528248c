"""AG News: 127,600 English news texts in four classes (X. Zhang et al., NeurIPS 2015).

Each line of the csv files has the form `"class","title","description"`, where the class is a number
from 1 to 4. The files have no header. A text consists of the title, a space and the description. As
in the paper, texts are read as sequences of characters.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from fedexp.core.errors import ConfigError
from fedexp.data.download import Published
from fedexp.data.text import LabelledTexts, TextSource


class AgNews(Published, TextSource):
    """AG News, read from `<data_dir>/ag_news/{train,test}.csv`. Missing files are downloaded."""

    CLASSES: ClassVar[tuple[str, ...]] = ("World", "Sports", "Business", "Sci/Tech")

    hosts = ("https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",)
    published = (
        ("train.csv", "b1a00f826fdfbd249f79597b59e1dc12"),
        ("test.csv", "d52ea96a97a2d943681189a97654912d"),
    )
    packed = False

    @property
    def download_folder(self) -> Path:
        return self.folder

    @property
    def paths(self) -> Sequence[Path]:
        return self.with_vocabulary([self.folder / name for name, _ in self.published])

    def read(self, length: int) -> LabelledTexts:
        self.fetch_missing()
        train, test = (read_news(self.folder / name, length) for name, _ in self.published)
        return LabelledTexts(train[0], test[0], train[1], test[1], self.CLASSES)


def read_news(path: Path, length: int) -> tuple[list[str], list[int]]:
    """Return the texts in a file, cut to the first `length` characters, and the labels.

    Labels start at 0. Raises ConfigError, with the number of the record, if a record is invalid.
    """
    texts, labels = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for row in csv.reader(file, strict=True):
                if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                    raise ValueError("must have a class from 1 to 4, a title and a description")
                texts.append(" ".join(part.strip() for part in row[1:])[:length])
                labels.append(int(row[0]) - 1)
    except (ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(f"{path}, record {len(texts) + 1}: {error}") from error
    if not texts:
        raise ConfigError(f"{path}: has no texts")
    return texts, labels
