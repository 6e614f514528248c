"""Find and read the files of labelled texts."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedexp.core.errors import ConfigError
from fedexp.data.types import MISSING, sort_classes

# accepted names of the columns
TITLES, BODIES, LABELS = ("title",), ("body", "content", "article"), ("label", "target")
# names of the last three columns in the files that are released with CFeD's code
UNNAMED = {"0": "title", "1": "body", "2": "label"}
UNCLEAR = ("-1", "-1.0", "none", "null", "na", "n/a")  # labels in lower case, maybe for no label


class Example(NamedTuple):
    text: str
    label: str  # the label as written in the file, or "" if labels are not read
    place: str  # file and line, for error messages


LAYOUTS = {
    "txt": "{}.txt",
    "csv": "{}.csv",
    "class_il": "*_{}_classIL*.csv",  # class_il and domain_il: files released with CFeD's code
    "domain_il": "*_{}_domainIL.csv",
}


def find_files(folder: Path, layout: str | None = None) -> tuple[list[Path], list[Path]]:
    """Return the training and test files in a folder.

    The validation files that are released with CFeD's code (`eval`) are used as training files,
    because a scenario splits the examples again.

    layout: a key of LAYOUTS. None: the first layout that matches a file in the folder.

    Raises ConfigError if training files or test files are missing.
    """
    for name in LAYOUTS if layout is None else [layout]:
        train, test, held = (
            sorted(folder.glob(LAYOUTS[name].format(split))) for split in ("train", "test", "eval")
        )
        if train and test:
            return train + (held if name.endswith("_il") else []), test
        if train or test:
            lost = LAYOUTS[name].format("test" if train else "train")
            raise ConfigError(
                f"{folder}: contains {(train or test)[0].name}, but {lost} is missing"
            )
    raise ConfigError(
        f"{folder}: has no texts{'' if layout is None else f' with dataset.layout={layout}'}, and"
        " they cannot be downloaded. Add files in one of these formats: (1) train.txt and test.txt,"
        " in which each line has a text, a tab and a class number, and class.txt, which has one"
        " class name per line; (2) train.csv and test.csv, which have the columns title, body and"
        " label; (3) CFeD's files, such as thucnews_train_classIL1.csv and"
        " thucnews_test_classIL1.csv"
    )


def read_texts(paths: Sequence[Path], length: int, labelled: bool = True) -> list[Example]:
    """Return the texts in txt or csv files, cut to their first `length` characters.

    White space at both ends of a text is removed.

    labelled: whether to read the label column, which csv files must then contain.

    Raises ConfigError if a file is missing, damaged or empty.
    """
    found: list[Example] = []
    for path in paths:
        before = len(found)
        records = _read_csv(path, labelled) if path.suffix == ".csv" else _read_txt(path)
        try:
            for line, text, label in records:
                found.append(Example(text[:length], label, f"{path}, line {line}"))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path}: cannot be read ({error})") from error
        if len(found) == before:
            raise ConfigError(f"{path}: has no texts")
    return found


def _read_txt(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, text, label) for each line `text<TAB>label`. Blank lines are skipped."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                text, tab, label = line.rpartition("\t")
                if not tab:
                    raise ConfigError(
                        f"{path}, line {number}: must have a text, a tab and a class number"
                    )
                yield number, text.strip(), label.strip()


def _read_csv(path: Path, labelled: bool) -> Iterator[tuple[int, str, str]]:
    """Yield (number of the record's last line, text, label) for each record of a csv file.

    The text consists of the title, directly followed by the body.
    """
    # Applies to the whole process. The default limit of characters is too small for long articles.
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        header = next(rows, [])
        columns, label = _columns(path, header, labelled)
        for row in filter(None, rows):
            if len(row) != len(header):
                raise ConfigError(
                    f"{path}, line {rows.line_num}: has {len(row)} values, but must have"
                    f" {len(header)}"
                )
            text = "".join(row[k].strip() for k in columns)
            yield rows.line_num, text, "" if label is None else row[label].strip()


def _columns(path: Path, header: list[str], labelled: bool) -> tuple[list[int], int | None]:
    """Return the indices of the columns that form the text, in order, and of the label column.

    The label column is None if labels are not read.
    """
    names = [name.strip().lower() for name in header]
    if names[-3:] == list(UNNAMED):
        names[-3:] = UNNAMED.values()
    texts = [k for kind in (TITLES, BODIES) for k, name in enumerate(names) if name in kind]
    labels = [k for k, name in enumerate(names) if name in LABELS]
    if not texts or (labelled and len(labels) != 1):
        wanted = f"at least one of {', '.join(TITLES + BODIES)}"
        if labelled:
            wanted += f", and one of {', '.join(LABELS)}"
        raise ConfigError(
            f"{path}, line 1: the columns are {', '.join(header) or '(none)'}, but there must be"
            f" {wanted}"
        )
    return texts, labels[0] if labelled else None


def name_classes(train: Sequence[Example]) -> tuple[str, ...]:
    """Return the class names that the labels of the training texts define.

    If the labels are numbers, the class names are the numbers 0 to C - 1; otherwise, they are the
    sorted labels. Raises ConfigError if a number is missing, or if there is a label such as -1 or
    None, which may mean that the label is missing.
    """
    found = {example.label for example in train}
    if unclear := [example for example in train if example.label.lower() in UNCLEAR]:
        raise ConfigError(
            f"{unclear[0].place}: the label {unclear[0].label}, of {len(unclear):,} training texts,"
            " may be a class or mean that there is no label; list all classes in class.txt, one per"
            " line, or remove these texts"
        )
    numbers = tuple(str(number) for number in range(len(found)))
    if found == set(numbers):
        return numbers
    if all(label.isdecimal() for label in found):
        missing = min(set(numbers) - found, key=int)
        raise ConfigError(
            f"{train[0].place.partition(',')[0]}: class {missing} has no training texts, but a"
            " higher-numbered class has some; list all class names in class.txt, one per line"
        )
    return tuple(sort_classes(found))


def require_complete(examples: Sequence[Example], classes: Sequence[str]) -> None:
    """Raise ConfigError if examples have an empty text, or no label.

    classes: the class names that the user listed.
    """
    absent = set(MISSING) - {name.lower() for name in classes}
    unlabelled = [example.place for example in examples if example.label.lower() in absent]
    empty = [example.place for example in examples if not example.text]
    for what, places in (("label (empty or nan)", unlabelled), ("text", empty)):
        if places:
            raise ConfigError(
                f"{places[0]}: has no {what}; this holds for {len(places):,} of the"
                f" {len(examples):,} examples. Remove or complete them"
            )


def label_numbers(examples: Sequence[Example], classes: Sequence[str]) -> list[int]:
    """Return the label of each text as a number.

    In the files, a label can be a class name or the number of a class, starting from 0. Raises
    ConfigError for an unknown label, and if some labels are numbers of classes, but others are both
    the number of a class and the name of another one.
    """
    places = {str(number): number for number in range(len(classes))}
    names = {name: number for number, name in enumerate(classes)}
    numbers = places | names
    no_names = sorted({example.label for example in examples} - names.keys())
    for example in examples:
        label = example.label
        if label not in numbers:
            raise ConfigError(
                f"{example.place}: the class '{label}' must be a number from 0 to"
                f" {len(classes) - 1} or one of {', '.join(classes)}"
            )
        if no_names and places.get(label, numbers[label]) != numbers[label]:
            raise ConfigError(
                f"{example.place}: the label '{label}' may be the name of a class or the number of"
                f" the class '{classes[places[label]]}', because the label '{no_names[0]}' can only"
                " be a number; use only names or only numbers"
            )
    return [numbers[example.label] for example in examples]
