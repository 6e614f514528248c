"""Find and read the files of labelled texts."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedexp.core.errors import ConfigError

# names of columns
TITLES, BODIES, LABELS = ("title",), ("body", "content", "article"), ("label", "target")
# the last three columns in the files that CFeD's code ships
UNNAMED = {"0": "title", "1": "body", "2": "label"}


@dataclass(frozen=True)
class Texts:
    """The examples from some files, in file order. All lists have the same length."""

    texts: list[str]
    labels: list[str]  # as in the file, or "" if labels are not read
    places: list[tuple[Path, int]]  # the file and line (from 1) at which an example begins


LAYOUTS = {
    "txt": "{}.txt",
    "csv": "{}.csv",
    "class_il": "*_{}_classIL*.csv",  # this layout and the next: the files of CFeD's code
    "domain_il": "*_{}_domainIL.csv",
}


def find_files(folder: Path, layout: str | None = None) -> tuple[list[Path], list[Path]]:
    """Return the training and test files in a folder.

    If `layout` is None, use the first layout that has a file in the folder. Validation files of
    CFeD's code (`eval`) count as training files, because a scenario divides all examples itself.

    Raises ConfigError if there are no files, or if only training or only test files exist.
    """
    for name in LAYOUTS if layout is None else [layout]:
        pattern = LAYOUTS[name]
        train, test, held = (
            sorted(folder.glob(pattern.format(split))) for split in ("train", "test", "eval")
        )
        if train and test:
            return train + (held if name.endswith("_il") else []), test
        if train or test:
            lost = "test" if train else "train"
            raise ConfigError(
                f"{folder / pattern.format(lost)}: is missing beside {(train or test)[0].name}"
            )
    if layout is not None:
        raise ConfigError(
            f"dataset.layout={layout}: {folder} has no {LAYOUTS[layout].format('train')}"
        )
    raise ConfigError(
        f"{folder}: has no texts, and they cannot be downloaded. Put there train.txt and test.txt"
        " (each line a text, a tab and the number of its class) with class.txt (a class name a"
        " line), or train.csv and test.csv (columns title, body, label), or CFeD's files (such as"
        " thucnews_train_classIL1.csv and thucnews_test_classIL1.csv)"
    )


def read_texts(paths: list[Path], length: int, labelled: bool = True) -> Texts:
    """Return the texts in txt or csv files, stripped and cut to their first `length` characters."""
    read: list[tuple[str, str, tuple[Path, int]]] = []
    for path in paths:
        before = len(read)
        records = _read_csv(path, labelled) if path.suffix == ".csv" else _read_lines(path)
        try:
            read += [(text[:length], label, (path, line)) for line, text, label in records]
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}, line {_undecodable_line(path)}: is not UTF-8 ({error.reason})"
            ) from error
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        if len(read) == before:
            raise ConfigError(f"{path}: has no texts")
    texts, labels, places = (list(column) for column in zip(*read, strict=True))
    return Texts(texts, labels, places)


def read_lines(path: Path) -> list[str]:
    """Return a text file's non-blank lines, stripped."""
    try:
        return [line.strip() for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}, line {_undecodable_line(path)}: is not UTF-8 ({error.reason})"
        ) from error


def _read_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, text, label) for lines `text<TAB>label`. Blank lines are skipped."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                text, tab, label = line.rpartition("\t")
                if not tab:
                    raise ConfigError(
                        f"{path}, line {number}: must be a text, a tab and the number of its class"
                    )
                yield number, text.strip(), label.strip()


def _read_csv(path: Path, labelled: bool) -> Iterator[tuple[int, str, str]]:
    """Yield (line, text, label) for the records of a csv file.

    The text is the title directly followed by the body.
    """
    # in characters, for the whole process; the default limit refuses long articles
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        line = 1
        try:
            header = next(rows, [])
            columns, label = _columns(path, header, labelled) if header else ([], None)
            line = rows.line_num + 1
            for row in rows:
                if row:
                    if len(row) != len(header):
                        raise ConfigError(
                            f"{path}, line {line}: has {len(row)} values, must have {len(header)}"
                        )
                    yield (
                        line,
                        "".join(row[k].strip() for k in columns),
                        "" if label is None else row[label].strip(),
                    )
                line = rows.line_num + 1
        except csv.Error as error:
            raise ConfigError(f"{path}, line {line}: is not a csv record ({error})") from error


def _columns(path: Path, header: list[str], labelled: bool) -> tuple[list[int], int | None]:
    """Return the columns that form the text, in this order, and the label's column."""
    names = [name.strip().lower() for name in header]
    if names[-3:] == list(UNNAMED):
        names[-3:] = UNNAMED.values()
    texts = [k for kind in (TITLES, BODIES) for k, name in enumerate(names) if name in kind]
    labels = [k for k, name in enumerate(names) if name in LABELS]
    if not texts or (labelled and len(labels) != 1):
        wanted = (
            f"at least one of {', '.join(TITLES + BODIES)}"
            + f" and one of {', '.join(LABELS)}" * labelled
        )
        raise ConfigError(
            f"{path}, line 1: the columns {', '.join(header) or '(none)'} must have {wanted}"
        )
    return texts, labels[0] if labelled else None


def _undecodable_line(path: Path) -> int:
    """Return the first line that is not UTF-8."""
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    raise AssertionError(f"{path} is UTF-8")


def name_classes(train: Texts) -> tuple[str, ...]:
    """Return the class names in the training labels: numbers 0..C-1, or names in sorted order."""
    found = set(train.labels)
    if not all(is_number(label) for label in found):
        return tuple(sorted(found))
    for number in range(len(found)):
        if str(number) not in found:
            raise ConfigError(
                f"{train.places[0][0].parent}: class {number} has no training text, but there are"
                " numbers beyond it; name all classes in class.txt, one a line"
            )
    return tuple(str(number) for number in range(len(found)))


def class_numbers(texts: Texts, classes: tuple[str, ...]) -> list[int]:
    """Return each text's label as a number. A label is a class name or its number from 0."""
    numbers = {str(number): number for number in range(len(classes))}
    numbers |= {name: number for number, name in enumerate(classes)}
    try:
        return [numbers[label] for label in texts.labels]
    except KeyError:
        row = next(k for k, label in enumerate(texts.labels) if label not in numbers)
        path, line = texts.places[row]
        named = "" if classes[0] == "0" else f" or one of {', '.join(classes)}"
        raise ConfigError(
            f"{path}, line {line}: the class '{texts.labels[row]}' must be a number from 0 to"
            f" {len(classes) - 1}{named}"
        ) from None


def is_number(label: str) -> bool:
    return re.fullmatch("[0-9]+", label) is not None
