"""Tabulate what each algorithm was checked against, from its header, the tests and the evidence."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedexp.analysis.layout import markdown
from fedexp.config.options import conf_directories, find_option, list_options
from fedexp_papers.readings import first_reading
from fedexp_papers.sweeps import all_paper_sweeps

PAGE = Path("docs", "algorithms", "checks.md")
NUMBER = r"(?:\(\d+\)(?:-\(\d+\))?|\d+(?:\.\d+)*(?:-\d+)?)"
EQUATION = re.compile(rf"(?:Eqs?\.|Algorithms?|Definitions?|section) {NUMBER}")
REPOSITORY = re.compile(r"\b(?!conf/|src/)[A-Za-z][\w-]*/[A-Za-z][\w-]+[\w](?=[,) ])")
COMMIT = re.compile(r"commit ([0-9a-f]{7,40})")
CODE = re.compile(r"released code|'s? code\b")
NO_CODE = re.compile("no code (?:by|of) the authors", re.IGNORECASE)
# The names of tests that compare with code of their own, or with a formula evaluated by hand. The
# second pattern is for tests that name a method.
INDEPENDENT = re.compile(
    "_equals?_.*(?:loop|formula|paper|released|autograd|torch|hand)|joint_ridge|minimise.*distance"
)
OF_METHOD = re.compile("_(?:equals?|is|are|gives?|minimises?|distils?|uses|learns?|projects?)_")
GENERIC = re.compile("engine|uninterrupted|bytes|fedavg$|rejected|finite|warmup|reaches")
INTRODUCTION = """# What each algorithm was checked against

`make reproduction` writes this table.

- equations: those that the header of the class names; "header": it has unnumbered formulas
- code: the released code that the header names, with its commit if recorded; "header": the header
  says what was taken from it, or differs, without an address
- tests: those that compare with a loop, a formula or released code written in the test
- printed: published values within the [tolerance](../../REPRODUCTION.md#noise-and-tolerance), of
  those measured at the full protocol

"""


def checks_page(root: Path) -> str:
    """Return the page of a checkout."""
    tests, judged = list(independent_tests(root)), count_judged(root)
    rows = {}
    for names, target in group_options().items():
        module, _, name = target.rpartition(".")
        header = getdoc(import_module(module)) or ""
        shown = sorted({test for test, used in tests if used & {name, *names}})
        values = [judged[plain(each)] for each in names if plain(each) in judged]
        within = [f"{good} of {every}" for good, every in values]
        rows[", ".join(names)] = {
            "equations": describe_equations(header),
            "code": describe_code(header),
            "tests": " ".join(f"`{test}`" for test in shown) or "-",
            "printed": ", ".join(within) or "-",
        }
    return INTRODUCTION + markdown(pd.DataFrame.from_dict(rows, orient="index"), "algorithm")


def group_options() -> dict[tuple[str, ...], str]:
    """Return the options that use the same class, and this class."""
    found: dict[str, list[str]] = {}
    for name in list_options("algorithm", conf_directories()):
        found.setdefault(target_of(name), []).append(name)
    return {tuple(names): target for target, names in found.items()}


def target_of(name: str) -> str:
    """Return the class that an option names, perhaps in the option on which it builds."""
    node: dict[str, Any] = yaml.safe_load(read_option(name))
    bases = [each for each in node.get("defaults", ()) if each != "_self_"]
    return str(node["_target_"] if "_target_" in node else target_of(bases[0]))


def read_option(name: str) -> str:
    path = find_option("algorithm", name, conf_directories())
    assert path is not None, "listed before"
    return path.read_text(encoding="utf-8")


def describe_equations(header: str) -> str:
    found = list(dict.fromkeys(EQUATION.findall(" ".join(header.split()))))
    has_formula = re.search(r"^ {4}\S", header, re.MULTILINE)
    return ", ".join(found[:4]) or ("header" if has_formula else "-")


def describe_code(header: str) -> str:
    """Return the repositories and commits of released code that a header names."""
    text = " ".join(header.split())
    if NO_CODE.search(text):
        return "none found"
    named = [*REPOSITORY.findall(text), *(f"at {commit}" for commit in COMMIT.findall(text))]
    return " ".join(dict.fromkeys(named)) or ("header" if CODE.search(text) else "-")


def independent_tests(root: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield each test with code of its own, and the options or classes that it tests.

    A test belongs to the method in its own name or in its file's name, and otherwise to the classes
    that it or the constants of its file use.
    """
    options = list_options("algorithm", conf_directories())
    for path in sorted([*root.glob("tests/*.py"), *root.glob("tests/*/*.py")]):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        constants = {name: names_in(node) for node in body for name in assigned_names(node)}
        of_file = {name for name in options if path.stem == f"test_{name}"}
        for node in body:
            test = node.name if isinstance(node, ast.FunctionDef) else ""
            if not test.startswith("test_") or GENERIC.search(test):
                continue
            methods = {name for name in options if test.startswith(f"test_{name}_")} or of_file
            if methods and OF_METHOD.search(test):
                yield test, methods
            elif not methods and INDEPENDENT.search(test):
                used = names_in(node)
                yield test, used.union(*(constants[each] for each in used & constants.keys()))


def assigned_names(node: ast.stmt) -> list[str]:
    """Return the names that an assignment binds."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def count_judged(root: Path) -> dict[str, tuple[int, int]]:
    """Return how many published values of a method are within the tolerance, and were judged."""
    sweeps = all_paper_sweeps()
    others = {name for sweep in sweeps for name in sweep.readings}
    paths = [root / "multirun" / each.name / "comparison.csv" for each in sweeps]
    kept = [path for path in paths if path.is_file() and path.parent.name not in others]
    every = pd.concat([first_reading(pd.read_csv(path, na_filter=False)) for path in kept])
    every = every[every["verdict"].isin(["within", "outside"])]
    names = every["method"].map(plain)
    return {
        str(name): (int((rows == "within").sum()), len(rows))
        for name, rows in every["verdict"].groupby(names)
    }


def plain(method: str) -> str:
    """Return the first word of a method's name in small letters, without underscores."""
    return re.split(r"[ (]", method)[0].lower().replace("_", "")
