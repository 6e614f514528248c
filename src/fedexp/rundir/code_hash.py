"""Compute checksums of the code of users' classes, so that a run detects changes of this code."""

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

OWN, CODE = "fedexp", " (code "
INSTALLED = frozenset({"site-packages", "dist-packages", "lib-dynload"})  # packages have versions


def code_mark(target: str) -> str | None:
    """Return `<class> (code <checksum>)` for a user's class.

    The checksum covers the file of the class's module and the files that this imports, directly or
    indirectly, from the same directory. Return None if the class belongs to fedexp or to an
    installed package, or is not found.

    target: the dotted path of the class. No code is run. Every change of a file counts, also in a
    comment, since changes without an effect cannot be recognised.
    """
    module = target.rpartition(".")[0]
    root = package_directory(module.partition(".")[0])
    if root is None or INSTALLED & {*root.parts} or CODE in target:  # it is marked already
        return None
    digest, files = hashlib.sha256(), source_files(root, module)
    for name in sorted(files):
        digest.update(f"{name} {read(files[name])[0]}\n".encode())
    return f"{target}{CODE}{digest.hexdigest()[:16]})" if files else None


def package_directory(package: str) -> Path | None:
    """Return the directory that contains a package or a top-level module, or None."""
    if package in ("", OWN):
        return None
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin in ("built-in", "frozen"):
        return None
    if places := list(spec.submodule_search_locations or ()):
        return Path(places[0]).parent
    return Path(spec.origin).parent if spec.origin else None


def source_files(root: Path, module: str) -> dict[str, Path]:
    """Return name -> file for a module and all modules below `root` that it imports.

    Indirect imports and the parent packages are included.
    """
    found: dict[str, Path] = {}
    names = [module]
    while names:
        name = names.pop()
        path = file_of(root, name)
        if path is not None and name not in found and name.partition(".")[0] != OWN:
            found[name] = path
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            names += [package, *imported_names(read(path)[1], package)]
    return found


def file_of(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split(".")) if module else root
    return next(
        (
            path
            for path in (base / "__init__.py", base.with_suffix(".py"))
            if module and path.is_file()
        ),
        None,
    )


def read(path: Path) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Return (a file's checksum, its imports as pairs of leading dots and name)."""
    stat = path.stat()
    return read_once(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1000)
def read_once(path: Path, changed: int, size: int) -> tuple[str, tuple[tuple[int, str], ...]]:
    content = path.read_bytes()
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):
        nodes = []  # importing the module reports the error
    found: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            found += [
                (node.level, name),
                *((node.level, f"{name}.{alias.name}".strip(".")) for alias in node.names),
            ]
    return hashlib.sha256(content).hexdigest(), tuple(found)


def imported_names(imports: tuple[tuple[int, str], ...], package: str) -> Iterator[str]:
    """Yield the absolute names of the imports in a module of `package`."""
    for dots, name in imports:
        if dots:
            above = package.split(".")[: len(package.split(".")) - dots + 1]
            yield ".".join([*above, *filter(None, [name])])
        else:
            yield name
