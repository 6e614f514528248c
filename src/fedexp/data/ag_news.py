"""AG News: 120,000 + 7,600 English news texts in four classes (X. Zhang et al., NeurIPS 2015).

A line of the csv files is `"class","title","description"`, with classes from 1 to 4 and no header.
As in the paper, a text is a character sequence. Title and description are joined by a space.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from fedexp.core.errors import ConfigError
from fedexp.data.download import Download
from fedexp.data.text import Labelled, TextSource
from fedexp.data.text_files import Texts

HOST = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
MD5 = {
    "train.csv": "b1a00f826fdfbd249f79597b59e1dc12",
    "test.csv": "d52ea96a97a2d943681189a97654912d",
}


class AgNews(TextSource):
    """`<data_dir>/ag_news/{train,test}.csv`, downloaded if missing."""

    CLASSES: ClassVar[tuple[str, ...]] = ("World", "Sports", "Business", "Sci/Tech")

    url: str | None  # mirror: the web folder of the files

    @property
    def paths(self) -> Sequence[Path]:
        return self.with_vocabulary([self.folder / name for name in MD5])

    def read(self, length: int) -> Labelled:
        if not all((self.folder / name).is_file() for name in MD5):
            Download((HOST,), tuple(MD5.items()), self.folder, packed=False).fetch(
                self.name, self.url
            )
        train, test = (read_news(self.folder / name, length) for name in MD5)
        y_train, y_test = ([int(label) - 1 for label in part.labels] for part in (train, test))
        return Labelled(train, test, y_train, y_test, self.CLASSES)


def read_news(path: Path, length: int) -> Texts:
    """Return the texts in a file, cut to their first `length` characters.

    Raises ConfigError with the number of an invalid line.
    """
    texts, labels, places = [], [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            for row in rows:
                if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                    raise ValueError("must be a class from 1 to 4, a title and a description")
                texts.append(" ".join(part.strip() for part in row[1:])[:length])
                labels.append(row[0])
                places.append((path, rows.line_num))
    except (ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(f"{path}, line {len(texts) + 1}: {error}") from error
    if not texts:
        raise ConfigError(f"{path}: has no texts")
    return Texts(texts, labels, places)
