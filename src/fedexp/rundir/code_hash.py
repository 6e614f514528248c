"""Compute checksums of the code of users' classes, so that runs detect changes to this code."""

import ast
import hashlib
import importlib.util
from functools import lru_cache
from pathlib import Path

FEDEXP, CODE = "fedexp", " (code "
INSTALLED = frozenset({"site-packages", "dist-packages", "lib-dynload"})  # packages have versions


def code_mark(target: str) -> str | None:
    """Return `<class> (code <checksum>)` for a user's class.

    The checksum covers the file of the class's module and all files from the same directory that
    this module imports, directly or indirectly. Return None if the class cannot be found, or
    belongs to fedexp or an installed package.

    target: the dotted path of the class. No code is run. Every change to a file changes the
    checksum, even a change in a comment, since harmless changes cannot be recognised.
    """
    module = target.rpartition(".")[0]
    root = package_directory(module.partition(".")[0])
    if root is None or INSTALLED & {*root.parts} or CODE in target:  # already marked
        return None
    digest, files = hashlib.sha256(), source_files(root, module)
    for name in sorted(files):
        digest.update(f"{name} {read(files[name])[0]}\n".encode())
    return f"{target}{CODE}{digest.hexdigest()[:16]})" if files else None


def package_directory(package: str) -> Path | None:
    """Return the directory that contains a package or a top-level module, or None."""
    if package in ("", FEDEXP):
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
    """Return the files, by module name, of a module and all modules in `root` that it imports.

    Indirect imports and parent packages are included.
    """
    found: dict[str, Path] = {}
    names = [module]
    while names:
        name = names.pop()
        path = file_of(root, name)
        if path is not None and name not in found and name.partition(".")[0] != FEDEXP:
            found[name] = path
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            names += [package, *(absolute(each, package) for each in read(path)[1])]
    return found


def file_of(root: Path, module: str) -> Path | None:
    """Return the file of a module in `root`, or None if it does not exist."""
    base = root.joinpath(*module.split("."))
    paths = (base / "__init__.py", base.with_suffix(".py")) if module else ()
    return next((path for path in paths if path.is_file()), None)


def absolute(name: str, package: str) -> str:
    """Return the absolute name of an import in a package, or an empty string if it is invalid."""
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:  # importing the module reports the error
        return ""


def read(path: Path) -> tuple[str, list[str]]:
    """Return a file's checksum and the names that it imports.

    Names of relative imports begin with dots.
    """
    stat = path.stat()
    return read_once(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1000)
def read_once(path: Path, changed: int, size: int) -> tuple[str, list[str]]:
    content = path.read_bytes()
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):
        nodes = []  # importing the module reports the error
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            start = f"{module}." if node.module else module
            names += [module, *(f"{start}{alias.name}" for alias in node.names)]
    return hashlib.sha256(content).hexdigest(), names
