"""The user's own files that a run uses: modules of their classes, and the files of their options.

Their copies are beside the run, in `source/`, and their hashes in origin.json. They show later what
was computed, but do not belong to the identity: after a change of results, the user raises the
`version` of the class. If a resumed run has changed files, their copies are in
`source_from_round<n>/`.
"""

import ast
import hashlib
import logging
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from fedexp.config.build import Built
from fedexp.config.options import conf_directories
from fedexp.config.values import is_of_fedexp, user_folders
from fedexp.core import storage
from fedexp.rundir import files

log = logging.getLogger("fedexp")
LIMIT = 2**20  # largest size of the copies of a run, in bytes
INSTALLED = {"site-packages", "dist-packages"}  # recorded by the versions of packages
STANDARD = Path(sysconfig.get_path("stdlib")).resolve()


def keep(
    built: Built, directory: Path, first_round: int, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Copy the own files of a run into its directory, and return what origin.json says of them.

    The result has `own_files`, name -> SHA-256, and the names of files over LIMIT as `not_copied`.
    It is empty without own files. Files that an earlier part of the run has, too, are not copied
    again.

    before: the content of origin.json until now; None for a run that starts.
    """
    for path in directory.glob(f"{files.SOURCES}*"):
        number = path.name.removeprefix(f"{files.SOURCES}_from_round")
        if before is None or (number.isdecimal() and int(number) >= first_round):
            shutil.rmtree(path)  # of rounds that are computed again
    known: dict[str, str] = {}
    for part in (before or {}).get("parts", ()):
        if part["first_round"] < first_round:
            known |= part.get("own_files", {})
    place = directory / (
        files.SOURCES if before is None else f"{files.SOURCES}_from_round{first_round}"
    )
    hashes: dict[str, str] = {}
    left_out: list[str] = []
    total = 0
    for name, path in sorted(find(built).items()):
        content = path.read_bytes()
        hashes[name] = hashlib.sha256(content).hexdigest()
        if known.get(name) == hashes[name]:
            continue
        if total + len(content) > LIMIT:
            left_out.append(name)
            continue
        total += len(content)
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        storage.write_atomically(place / name, content)
    if left_out:
        log.warning(
            "own files are not copied into the run, because all copies may have %s bytes: %s;"
            " origin.json has their hashes",
            f"{LIMIT:,}",
            ", ".join(left_out),
        )
    found: dict[str, Any] = {"own_files": hashes} if hashes else {}
    return found | ({"not_copied": left_out} if left_out else {})


def find(built: Built) -> dict[str, Path]:
    """Return the user's own files that a run uses, by their names in the run directory.

    These are the modules of the parts' classes, the modules that these import, without installed
    packages, and the yaml files of config groups in the directories of `--config-dir`.
    """
    found: dict[str, Path] = {}
    modules = [kind.__module__ for part in vars(built).values() for kind in classes_of(part)]
    seen: set[str] = set()
    while modules:
        name = modules.pop()
        if name in seen or (path := own_source(name)) is None:
            continue
        seen.add(name)
        package = path.name == "__init__.py"
        found[f"{name.replace('.', '/')}{'/__init__' if package else ''}.py"] = path
        modules += imported(name, path, package)
    for number, folder in enumerate(user_folders()):
        start = f"{folder.name}_{number}" if number else folder.name
        groups = {path.name for conf in conf_directories() for path in conf.iterdir()}
        for pattern in ("*.yaml", *(f"{group}/**/*.yaml" for group in groups)):
            for path in folder.glob(pattern):
                found[f"{start}/{path.relative_to(folder).as_posix()}"] = path
    return found


def classes_of(part: Any) -> Iterator[type]:
    """Yield the classes of a part, of its fields, and of the items of lists."""
    if isinstance(part, list | tuple):
        for item in part:
            yield from classes_of(item)
    elif is_dataclass(part):
        yield type(part)
        for field in fields(part):
            yield from classes_of(getattr(part, field.name))


def own_source(name: str) -> Path | None:
    """Return the file of a loaded module, or None if it is not the user's own."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if is_of_fedexp(name) or file is None or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    foreign = path.is_relative_to(STANDARD) or not INSTALLED.isdisjoint(path.parts)
    return None if foreign or not path.is_file() else path


def imported(name: str, path: Path, package: bool) -> Iterator[str]:
    """Yield the names of modules that a module may import, and of the packages around it."""
    yield name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                base = name.split(".")[
                    : None if package and node.level == 1 else package - node.level
                ]
                start = ".".join([*base, *filter(None, [node.module])])
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)
