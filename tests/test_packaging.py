"""The wheel, installed into an environment of its own and used from another directory. Building it
needs a package index.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from fedexp.core import provenance

pytestmark = pytest.mark.slow  # builds packages

ROOT = Path(__file__).parents[1]


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command without the checkout in its environment; return its output."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {
        k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("FEDEXP_")
    }
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def conf_files() -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the sdist and the wheel built from it, and with the wheel built from
    the checkout in direct/.
    """
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    call(sys.executable, "-m", "build", "--wheel", "--outdir", out / "direct", ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return bin/ of a new environment that has only the wheel, and the packages of this one.

    A path in a .pth file does not bring the .pth files there, such as that of an editable fedexp.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (theirs,) = folder.glob("lib/python*/site-packages")
    (theirs / "ours.pth").write_text("\n".join(ours))
    (wheel,) = (built / "direct").glob("*.whl")
    install = ("-m", "pip", "--python", folder / "bin/python", "install", "--quiet")
    call(sys.executable, *install, "--no-deps", "--no-index", wheel, cwd=built)
    return folder / "bin"


def test_wheel_and_sdist_contain_the_configuration(built: Path):
    (sdist,), (from_sdist,), (direct,) = (
        built.glob("*.tar.gz"),
        built.glob("*.whl"),
        (built / "direct").glob("*.whl"),
    )
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    assert conf_files() | tests | {"README.md", "LICENSE", "CONTRIBUTING.md", "Makefile"} <= packed
    strays = {
        name
        for name in packed
        if name.startswith((".venv", "data", "outputs", "multirun", "build", "dist"))
    }
    # the tables and kept runs of REPRODUCTION.md, which tests read
    tables = r"README.md|[^/]+/((table|comparison).(csv|md)|runs.(jsonl.xz|csv))"
    assert [name for name in strays if not re.fullmatch(f"multirun/({tables})", name)] == []

    # Both wheels have the same files: the package with conf/.
    assert names(from_sdist) == names(direct)
    assert {f"fedexp/{name}" for name in conf_files()} <= names(direct)
    folders = {name.split("/")[0].split("-")[0] for name in names(direct)}
    assert folders == {path.name for path in (ROOT / "src").iterdir()}


def test_wheel_runs_from_another_directory(environment: Path, tmp_path: Path):
    where = "import fedexp.config.options as c; print(c.__file__, c.conf_directory(), sep='\\n')"
    for line in call(environment / "python", "-c", where, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(environment.parent.resolve()), (
            "code and conf/ come from the wheel"
        )

    shown = yaml.safe_load(call(environment / "fedexp", "--cfg", "job", cwd=tmp_path))
    assert shown["dataset"]["name"] == "digits"

    call(environment / "fedexp", "tracker=none", "rounds=2", "hydra.run.dir=run", cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("completed", 2)
    assert summary["commit"] == provenance.commit(), "that of the checkout"
    origin = json.loads((tmp_path / "run" / "origin.json").read_text())
    assert origin["parts"][0]["source"] == provenance.source()
    assert (tmp_path / "run" / "figures" / "curves.png").exists()
