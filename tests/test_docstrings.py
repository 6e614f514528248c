"""Docstrings are sentences that stand without the name of what they describe."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedexp"
# Words that begin a fragment such as "Of all tasks", which makes sense only beside the name of its
# function.
FRAGMENT_STARTS = (
    "Of",
    "Those",
    "With",
    "Without",
    "What",
    "Whether",
    "How",
    "As",
    "Where",
    "Which",
    "Who",
    "Whose",
)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, docstring) of the module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def fragments(source: str) -> list[int]:
    """Return the lines of the docstrings that begin with one of FRAGMENT_STARTS or with `The
    same`."""
    return [
        line
        for line, text in docstrings(source)
        if text.split()[0].rstrip(",:;") in FRAGMENT_STARTS or text.startswith("The same")
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Of all tasks.", True),
        ("The same for two models.", True),
        ("Whether a run is over.", True),
        ("Return the total number of rounds.", False),
        ("Without", True),
        ("Offer a choice.", False),
    ],
)
def test_a_fragment_is_recognised_by_its_first_word(text: str, found: bool) -> None:
    source = f'class Run:\n    def rounds(self):\n        """{text}"""\n'
    assert fragments(source) == ([3] if found else [])


def test_no_docstring_of_the_package_begins_as_a_fragment() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    assert [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in files
        for line in fragments(path.read_text("utf-8"))
    ] == []
