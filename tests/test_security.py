"""Reading files cannot run code: no pickle except between fedexp's own processes, no unchecked
extraction, no eval."""

import ast
import json
import os
import pickle
import shutil
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fedexp
from fedexp.cli import main
from fedexp.config.build import build
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.data.huggingface import load
from fedexp.models.pretrained import Timm, Torchvision
from quick_runs import SMALL
from toy_federation import composed

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
# The ranks of a run send each other signed pickles.
KNOWN = {
    "engine/ranks/objects.py": {"import pickle"},
    "engine/hardware.py": {"import joblib"},  # its cpu_count
    # archives with the published md5 checksum
    "data/download.py": {"extract_archive"},
}
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "compile", "__import__", "unsafe_load", "full_load", "read_pickle"}
CALLS |= {
    "extractall",
    "extract",
    "extract_archive",
    "unpack_archive",
    "download_and_extract_archive",
    "fromregex",
}
NEEDED = {"np.load": ("allow_pickle", False), "numpy.load": ("allow_pickle", False)}
NEEDED |= {"torch.load": ("weights_only", True)}


def list_unsafe_calls(text: str) -> list[str]:
    """List what a program does that could run the content of a file."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [f"import {n.name}" for n in node.names if n.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [f"import {node.module}"] * (str(node.module).partition(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            found += check_call(node)
    return found


def check_call(node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
    if name in NEEDED and given.get(NEEDED[name][0]) is not NEEDED[name][1]:
        return [f"{name} without {NEEDED[name][0]}={NEEDED[name][1]}"]
    if name == "yaml.load" and any(ast.unparse(k) == "Loader=LOADER" for k in node.keywords):
        return []  # what LOADER is, test_yaml_loader_makes_plain_values_only says
    if (
        name in ("yaml.load", "os.system", "os.popen")
        or given.get("shell") is True
        or given.get("allow_pickle") is True
    ):
        return [name]
    # re.compile, torch.compile, net.eval()
    method_of_model = last in ("compile", "eval") and "." in name
    return [name] if last in CALLS and not method_of_model else []


def test_source_code_calls_no_unsafe_reader():
    found = {}
    for path in SOURCES:
        if calls := list_unsafe_calls(path.read_text(encoding="utf-8")):
            found[path.relative_to(ROOT).as_posix()] = set(calls)
    assert found == {f"src/fedexp/{name}": calls for name, calls in KNOWN.items()}


def test_yaml_loader_makes_plain_values_only():
    assert issubclass(storage.LOADER, yaml.constructor.SafeConstructor)
    with pytest.raises(ValueError, match="could not determine a constructor"):
        storage.load_yaml("!!python/object/apply:os.getcwd []")


UNSAFE = """
import pickle
from pickle import loads
import torch, dill
eval(x)
exec(x)
os.system(x)
np.load(p)
np.load(p, allow_pickle=True)
np.load(p, allow_pickle=flag)
torch.load(p)
torch.load(p, weights_only=False)
yaml.load(x)
yaml.unsafe_load(x)
tar.extractall(p)
subprocess.run(x, shell=True)
shutil.unpack_archive(a)
pd.read_pickle(p)
__import__(x)
"""


@pytest.mark.parametrize("text", UNSAFE.strip().splitlines())
def test_unsafe_calls_are_found(text):
    assert len(list_unsafe_calls(text)) == 1


class Thief:
    def __reduce__(self):
        return os.system, ("echo stolen > stolen",)


# ---- classes in someone else's run directory ----


METHOD = """
from fedexp.algorithms.base import FedAvg

class Mine(FedAvg):
    pass
"""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("shelf") / "run"
    fedexp.run([*SMALL, "rounds=1"], directory=directory)
    (directory / "summary.json").unlink()  # unfinished
    return directory


def resumed(config: dict[str, Any], here: Path, shelf: Path, *arguments: str) -> int:
    """Resume a run directory from another person, with this configuration."""
    theirs = Path(shutil.copytree(shelf, here / "theirs"))
    (theirs / "config.yaml").write_text(yaml.safe_dump(config))
    origin = json.loads((theirs / "origin.json").read_text())
    origin["values"]["algorithm._target_"] = config["algorithm"]["_target_"]
    (theirs / "origin.json").write_text(json.dumps(origin))
    return main.main(["resume=theirs", *arguments])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("_target_", "evil.Class", "algorithm._target_=evil.Class: is not a fedexp class"),
        ("_target_", "os.mkdir", "algorithm._target_=os.mkdir: is not a fedexp class"),
        ("paradigm", "${oc.env:SECRET_KEY}", "config.yaml: algorithm.paradigm contains ${...}"),
    ],
)
def test_stored_configuration_runs_no_code(here, shelf, capsys, key, value, words):
    (here / "evil.py").write_text("from pathlib import Path\nPath('stolen').mkdir()\n")
    config = yaml.safe_load((shelf / "config.yaml").read_text())
    config["algorithm"][key] = value
    assert resumed(config, here, shelf) == 2
    assert words in capsys.readouterr().err
    assert not Path("stolen").exists()


def test_package_that_this_command_names_is_trusted(here, shelf, capsys, monkeypatch):
    """A yaml file in its --config-dir names it as a `_target_`, not under any other key."""
    monkeypatch.syspath_prepend(here)
    (here / "own_method.py").write_text(METHOD)
    config = yaml.safe_load((shelf / "config.yaml").read_text())
    config["algorithm"]["_target_"] = "own_method.Mine"
    (here / "conf" / "algorithm").mkdir(parents=True)
    option = here / "conf" / "algorithm" / "mine.yaml"
    option.write_text("x: own_method.Mine\n")
    assert resumed(config, here, shelf, "--config-dir", "conf") == 2
    assert "is not a fedexp class" in capsys.readouterr().err
    option.write_text("_target_: own_method.Other\n")
    assert main.main(["resume=theirs", "--config-dir", "conf"]) == 0


# ---- files of weights ----


def test_timm_weights_are_not_unpickled(tmp_path, monkeypatch):
    """timm up to 1.0.24 calls torch.load with weights_only=False."""

    def create_model(name, **options):
        return torch.load(options["pretrained_cfg_overlay"]["file"], weights_only=False)

    monkeypatch.chdir(tmp_path)
    torch.save({"x": Thief()}, "evil.pth")
    timm = types.SimpleNamespace(is_model=lambda name: True, create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", timm)
    model = Timm(name="any", weights="evil.pth", image_size=None)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(ConfigError, match=r"model.weights=evil.pth: .*Weights only load failed\)$"):
        model.network((3, 8, 8), 2)
    assert not Path("stolen").exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_torchvision_weights_are_read_with_weights_only(monkeypatch):
    asked = {}
    weights = types.SimpleNamespace(get_state_dict=lambda **options: asked.update(options) or {})
    monkeypatch.setattr(
        "torchvision.models.get_model_weights", lambda name: types.SimpleNamespace(DEFAULT=weights)
    )
    model = Torchvision(name="resnet18", weights="DEFAULT", image_size=None)
    assert model.published_weights() == {}
    assert asked["weights_only"] is True


def test_changed_pickles_of_cifar_are_not_read(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    for name, _ in (*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], "")):
        (folder / name).write_bytes(pickle.dumps(Thief()))
    with pytest.raises(ConfigError, match=r"a file in .* is corrupt"):
        build(composed("dataset=cifar10", f"data_dir={tmp_path}")).dataset.load()
    assert not Path("stolen").exists()


# ---- names that libraries read as programs ----


@pytest.mark.parametrize(
    "path", ["pandas", "./pandas", "hf://datasets/pandas", "a/b/c", "script.py", ""]
)
def test_hugging_face_loader_names_are_rejected(path, monkeypatch):
    """`pandas` would unpickle files in the working directory."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    allowed = "install it with" if path == "./pandas" else "must be the name of a data set on"
    with pytest.raises(ConfigError, match=allowed):
        load(path, None)


def test_folder_named_like_a_loader_is_read_as_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pandas").mkdir()
    asked = []
    library = types.SimpleNamespace(load_dataset=lambda path, name: asked.append(path) or {})
    monkeypatch.setitem(sys.modules, "datasets", library)
    load("pandas", None)
    assert asked == [str(tmp_path / "pandas")]


def test_dependencies_have_safe_versions():
    """From matplotlib 3.10.9 on, a style file cannot run code; from datasets 4 on, a data set
    cannot."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "matplotlib>=3.10.9" in project["dependencies"]
    assert project["optional-dependencies"]["huggingface"] == ["datasets>=4.0,<6"]
