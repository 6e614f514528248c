"""The commit and the source of the running code.

hatch_build.py reads this file while a package is built, so it imports only the standard library.
"""

import functools
import hashlib
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parents[1]  # the checkout if fedexp runs from source
COMMIT = "commit.txt"  # in a package that was built from a checkout: its commit


def commit_of(checkout: Path) -> str | None:
    """Return the git commit of a checkout, or None if the folder is not the root of one.

    A `+` at the end means that the checkout has uncommitted changes.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=checkout,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != checkout:
            # fedexp is installed in an environment inside another project's checkout
            return None
        changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return None


# The results are cached, because the running code does not change and calling git is slow.
@functools.cache
def commit() -> str | None:
    """Return the commit of fedexp's checkout, or of the checkout that the package was built from.

    None: the package was built without git.
    """
    written = PACKAGE / COMMIT
    return commit_of(ROOT) or (written.read_text().strip() if written.is_file() else None)


@functools.cache
def packages() -> dict[str, str]:
    """Return the versions of all installed packages, by name. Their order is alphabetical."""
    found: dict[str, str] = {}
    for each in metadata.distributions():  # the first of a name is the one that is imported
        name = each.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), each.version)
    return dict(sorted(found.items()))


@functools.cache
def source() -> str:
    """Return a hash of fedexp's code and options, with those of its neighbours `fedexp_*`.

    It is equal for a checkout and a package that was built from it.
    """
    folders = [
        (f"{path.parent.name}/", path.parent) for path in PACKAGE.parent.glob("*/__init__.py")
    ]
    folders = [each for each in folders if each[0].startswith("fedexp")]
    if not (PACKAGE / "conf").is_dir():
        folders.append(("fedexp/conf/", ROOT / "conf"))
    found = {
        f"{name}{path.relative_to(folder).as_posix()}": path
        for name, folder in folders
        for kind in ("py", "yaml")
        for path in folder.rglob(f"*.{kind}")
    }
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(name.encode() + b"\0" + hashlib.sha256(found[name].read_bytes()).digest())
    return total.hexdigest()
