"""The layout of the packages: floors of fedexp, and the neighbours that extend it."""

import ast
import functools
import re
import zlib
from pathlib import Path

import pytest

from fedexp.core.rng import generator_for

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fedexp"
NEIGHBOURS = sorted(path for path in (ROOT / "src").glob("fedexp_*") if path.is_dir())
# From the lowest floor up. A package may import only from lower floors, also within functions.
FLOORS = (
    ("core",),
    ("data",),
    ("metrics", "models"),
    ("rundir", "algorithms"),
    ("engine", "figures", "trackers"),
    ("config",),
    ("training", "analysis"),
    ("cli", "testing"),
)
# What neighbours may import: modules, or packages with their modules.
# what each neighbour may import from fedexp
METHODS = ("algorithms", "core", "data", "models")
REPORTS = ("analysis", "config", "engine", "figures", "metrics", "rundir", "trackers")
PUBLIC = {"fedexp_continual": METHODS, "fedexp_papers": (*METHODS, *REPORTS)}
# Types of a higher floor that only annotations name: what callbacks see of a run.
TYPES_ABOVE = {"trackers/base.py": {"training.simulation.Simulation", "training.state.RoundResult"}}
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path):
    """(line, dotted name) of every import, also within functions and for type checkers only."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


# Purposes whose keys have the number of a task, except the first: client 0 of the second task has
# the validation stream of client 1 of the first one. This stays, since runs would change.
WITH_TASK = {"shared", "validation", "public", "partition", "assign"}


def purposes(package):
    """(purpose, length of the key, or None if it varies) of each generator, by literal names."""
    drawn = {"generator_for": 2, "torch_seed": 2, "generator": 1, "rng": 1}  # place of the key
    for path in sorted(package.rglob("*.py")):
        for node in nodes(path):
            name = node.func if isinstance(node, ast.Call) else None
            called = getattr(name, "id", getattr(name, "attr", None))
            given = node.args[: drawn[called]][-1:] if called in drawn else []
            if not given or isinstance(given[0], ast.Name | ast.Starred):
                continue  # the function itself passes its arguments on
            text = given[0].values[0] if isinstance(given[0], ast.JoinedStr) else given[0]
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                key = node.args[drawn[called] :]
                varies = any(isinstance(part, ast.Starred) for part in key)
                # the round is the first part of the key in hooks
                yield text.value, None if varies else len(key) + (called in ("generator", "rng"))


def test_each_purpose_of_random_numbers_has_keys_of_one_length():
    """Keys with zeros at the end are equal: (1, 0) and (1,) give the same numbers."""
    a, b = (generator_for(0, "x", *key).integers(2**60) for key in ((1, 0), (1,)))
    assert a == b
    lengths = {}
    for package in (PACKAGE, *NEIGHBOURS):
        for purpose, length in purposes(package):
            lengths.setdefault(purpose, set()).add(length)
    assert {"batches", "augment", "windows", "initial model", "FedFOMO validation"} <= set(lengths)
    several = {name for name, found in lengths.items() if len(found) > 1 or None in found}
    assert several == WITH_TASK
    codes = {zlib.crc32(name.encode()) for name in lengths}
    assert len(codes) == len(lengths), "two purposes share their numbers"


def test_every_import_points_to_a_floor_below():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, name in imported(path):
            package, room = [*name.split("."), ""][:2]
            own = room_of(path)
            among = package == "fedexp" and room != own and {room, own} <= FLOOR.keys()
            allowed = TYPES_ABOVE.get(path.relative_to(PACKAGE).as_posix(), ())
            if among and FLOOR[room] >= FLOOR[own] and name.removeprefix("fedexp.") not in allowed:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {room}")
    assert not wrong, "\n".join(wrong)


def test_the_package_imports_no_tools_of_the_repository():
    found = {name.split(".")[0] for path in PACKAGE.rglob("*.py") for _, name in imported(path)}
    assert not found & {"benchmarks", "fedexp_papers", "tests", "tools"}


def imported_modules(path, known):
    """The modules of fedexp among `known` that a module imports, except for TYPES_ABOVE."""
    above = TYPES_ABOVE.get(path.relative_to(PACKAGE).as_posix(), ())
    names = (name for _, name in imported(path) if name.removeprefix("fedexp.") not in above)
    for name in names:
        yield name if name in known else name.rpartition(".")[0]


def test_no_modules_import_each_other_in_a_circle():
    paths = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    del paths["fedexp"]  # its public names are imported when they are used
    left = {
        name: {*imported_modules(path, paths)} & paths.keys() - {name}
        for name, path in paths.items()
    }
    while free := {name for name, wanted in left.items() if not wanted & left.keys()}:
        left = {name: wanted for name, wanted in left.items() if name not in free}
    assert not left, "in a circle, or above one: " + ", ".join(sorted(left))


def test_every_package_has_a_floor():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and list(path.rglob("*.py"))}
    assert rooms == set(FLOOR)


def test_private_interfaces_of_libraries_are_in_one_place():
    private = re.compile(
        r"hydra\._internal|torch\._(?!_)|logging\._"
        r"|\._(value|get_node|dereference_node|is_none|is_missing)\("
    )
    elsewhere = [
        f"{path.relative_to(PACKAGE)}: {found.group()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE / "core" / "private"
        for found in private.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not elsewhere, "core/private is their place"


# --- neighbours


def test_fedexp_names_no_neighbour():
    """Except in messages for commands of earlier versions, which a neighbour has now."""
    names = re.compile("|".join(path.name.replace("_", "[_-]") for path in NEIGHBOURS))
    files = {*PACKAGE.rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")}
    files.remove(PACKAGE / "config/removed.py")
    found = [path for path in files if names.search(path.read_text(encoding="utf-8"))]
    assert NEIGHBOURS
    assert not found


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=lambda path: path.name)
def test_neighbours_import_only_public_names(neighbour):
    wrong = []
    for path in sorted(neighbour.rglob("*.py")):
        for line, name in imported(path):
            package, *rest = name.split(".")
            private = package == "fedexp" and any(part.startswith("_") for part in rest)
            inner = package == "fedexp" and rest[0] not in PUBLIC[neighbour.name]
            other = package in {each.name for each in NEIGHBOURS} - {neighbour.name}
            if private or inner or other or "private" in rest:
                wrong.append(f"{path.relative_to(neighbour)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_options_of_neighbours_have_names_of_their_own():
    """Hydra would use fedexp's option instead of another one with the same name."""
    confs = [ROOT / "conf", *(path / "conf" for path in NEIGHBOURS)]
    names = [path.relative_to(conf) for conf in confs for path in conf.rglob("*.yaml")]
    assert len(names) == len(set(names))
