"""What fedexp reads cannot run code: no pickle but between its own processes, no unchecked
extraction, no eval."""

import ast
import os
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch
import yaml

from fedexp.cli.job import resume_command
from fedexp.config import trust
from fedexp.config.options import conf_directory
from fedexp.config.overrides import read_stored
from fedexp.config.trust import require_typed_destination, user_folders
from fedexp.core import yaml_files
from fedexp.core.errors import ConfigError
from fedexp.data.huggingface import load
from fedexp.figures.pictures import Pictures
from fedexp.models.pretrained import Timm, Torchvision
from fedexp.trackers.base import NoTracker
from fedexp.trackers.several import Several
from fedexp.trackers.tensorboard_tracker import TensorBoard

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
# The engines' processes send each other pickles, over a socket pair or torch.distributed; CIFAR's
# files are read by torchvision once their checksums are those of the published ones.
KNOWN = {
    "engine/processes/channel.py": {"import pickle", "torch.load without weights_only=True"},
    # tar files with filter="data"; shutil skips zip entries that lead outside (test_archive.py)
    "data/download.py": {"shutil.unpack_archive"},
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


def faults(text: str) -> list[str]:
    """What a program does that could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [f"import {n.name}" for n in node.names if n.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [f"import {node.module}"] * (str(node.module).partition(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            found += call_faults(node)
    return found


def call_faults(node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
    if name in NEEDED and given.get(NEEDED[name][0]) is not NEEDED[name][1]:
        return [f"{name} without {NEEDED[name][0]}={NEEDED[name][1]}"]
    if name == "yaml.load" and any(ast.unparse(k) == "Loader=LOADER" for k in node.keywords):
        return []  # what LOADER is, test_the_loader_of_yaml_files_makes_plain_values says
    if (
        name in ("yaml.load", "os.system", "os.popen")
        or given.get("shell") is True
        or given.get("allow_pickle") is True
    ):
        return [name]
    # re.compile, torch.compile, net.eval()
    method_of_model = last in ("compile", "eval") and "." in name
    return [name] if last in CALLS and not method_of_model else []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_that_runs_what_it_reads(path):
    found = faults(path.read_text(encoding="utf-8"))
    known = [KNOWN[name] for name in KNOWN if path.as_posix().endswith(name)]
    assert set(found) == set().union(*known)


def test_the_loader_of_yaml_files_makes_plain_values():
    assert issubclass(yaml_files.LOADER, yaml.constructor.SafeConstructor)
    with pytest.raises(ValueError, match="could not determine a constructor"):
        yaml_files.load("!!python/object/apply:os.getcwd []")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "import pickle",
            "from pickle import loads",
            "import torch, dill",
            "eval(x)",
            "exec(x)",
            "os.system(x)",
        ),
        *(
            "np.load(p)",
            "np.load(p, allow_pickle=True)",
            "np.load(p, allow_pickle=flag)",
            "torch.load(p)",
        ),
        *(
            "torch.load(p, weights_only=False)",
            "yaml.load(x)",
            "yaml.unsafe_load(x)",
            "tar.extractall(p)",
        ),
        *(
            "subprocess.run(x, shell=True)",
            "shutil.unpack_archive(a)",
            "pd.read_pickle(p)",
            "__import__(x)",
        ),
    ],
)
def test_the_check_finds(text):
    assert len(faults(text)) == 1


class Thief:
    def __reduce__(self):
        return os.system, ("echo stolen > stolen",)


# ---- where a resumed run is tracked ----


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["tracker.entity=mallory", "resume=x"], True),
        (["tracker.store=http://mallory", "resume=x", "rounds=2"], True),
        (["+tracker.options={tensorboard: {logdir: /home}}", "resume=x"], True),
        (["resume=x", "tracker.entity=mallory"], False),  # typed now
        (["tracker.entity=mallory"], False),  # a new run
        (["tracker.name=x", "tracker.tags=[entity]", "resume=x"], False),
    ],
)
def test_a_place_that_only_the_directory_names_is_refused(overrides, refused):
    tracker = TensorBoard(logdir="/home")
    if refused:
        with pytest.raises(ConfigError, match="says where the run is tracked"):
            require_typed_destination(tracker, overrides, Path("x"))
    else:
        require_typed_destination(tracker, overrides, Path("x"))
    require_typed_destination(NoTracker(), overrides, Path("x"))
    require_typed_destination(Several(members=[NoTracker()]), overrides, Path("x"))


def test_what_is_typed_takes_the_place_of_what_is_stored(tmp_path):
    path = tmp_path / "overrides.yaml"
    stored = ["rounds=3", "tracker=wandb", "+tracker.project=p", "resume=x", "data=${data_dir}/a"]
    path.write_text(yaml.safe_dump(stored))
    groups = ["tracker"]
    assert read_stored(path, groups, []) == [*stored[:3], stored[4]]
    assert read_stored(path, groups, ["rounds"]) == [*stored[1:3], stored[4]]
    # another tracker has other keys
    assert read_stored(path, groups, ["tracker"]) == [stored[0], stored[4]]


def test_folders_of_the_user_are_those_that_are_not_fedexp_s(tmp_path):
    assert user_folders([conf_directory(), tmp_path]) == [tmp_path]


def test_a_class_of_a_run_is_trusted_under_its_target_alone(tmp_path):
    (tmp_path / "logging.yaml").write_text("handlers:\n  x: {class: own.Handler}\n")
    (tmp_path / "model.yaml").write_text("_target_: own.Model\n")
    assert trust.find_naming_file("own.Model", [tmp_path]) == tmp_path / "model.yaml"
    assert trust.find_naming_file("own.Handler", [tmp_path]) is None
    assert (
        trust.find_naming_file("own.Handler", [tmp_path], trust.NAMES) == tmp_path / "logging.yaml"
    )


def test_the_resume_command_names_where_the_run_is_tracked():
    given = ["tracker.project=stored", "resume=/x/run", "tracker.project=my runs", "seed=1"]
    job = types.SimpleNamespace(directory=Path("/x/run"), overrides=given)
    assert resume_command(job) == "fedexp resume=/x/run 'tracker.project=my runs'"


# ---- files of weights ----


def test_a_library_that_would_unpickle_weights_gets_tensors_alone(tmp_path, monkeypatch):
    """As timm did up to 1.0.24: torch.load with weights_only=False."""

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


def test_published_weights_of_torchvision_are_read_as_tensors(monkeypatch):
    asked = {}
    weights = types.SimpleNamespace(get_state_dict=lambda **options: asked.update(options) or {})
    monkeypatch.setattr(
        "torchvision.models.get_model_weights", lambda name: types.SimpleNamespace(DEFAULT=weights)
    )
    model = Torchvision(name="resnet18", weights="DEFAULT", image_size=None)
    assert model.published_weights() == {}
    assert asked["weights_only"] is True


# ---- names that libraries read as programs ----


@pytest.mark.parametrize(
    "path", ["pandas", "./pandas", "hf://datasets/pandas", "a/b/c", "script.py", ""]
)
def test_a_reader_of_hugging_face_is_no_data_set(path, monkeypatch):
    """`pandas` unpickles files of the working directory; its library is never called."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    allowed = "needs the package datasets" if path == "./pandas" else "must be a name on the Hugg"
    with pytest.raises(ConfigError, match=allowed):
        load(path, None)


def test_a_folder_with_the_name_of_a_reader_is_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pandas").mkdir()
    asked = []
    library = types.SimpleNamespace(load_dataset=lambda path, name: asked.append(path) or {})
    monkeypatch.setitem(sys.modules, "datasets", library)
    load("pandas", None)
    assert asked == [str(tmp_path / "pandas")]


@pytest.mark.parametrize(
    ("style", "said"),
    [
        (b"text.usetex: True\n", "which runs LaTeX"),
        (b"font.size: 9\n  text.usetex : on # x\n", "which runs LaTeX"),
        (b"\xff\xfe", "must be a matplotlib style file"),
    ],
)
def test_a_style_file_runs_no_program(tmp_path, style, said):
    (tmp_path / "evil.mplstyle").write_bytes(style)
    with pytest.raises(ConfigError, match=said):
        Pictures(style=str(tmp_path / "evil.mplstyle"))
    named = {"draw": True, "style": str(tmp_path / "evil.mplstyle")}
    assert Pictures.of(named) == Pictures()  # of the configuration of a run


def test_a_style_file_without_latex_is_taken(tmp_path):
    (tmp_path / "fine.mplstyle").write_text("text.usetex: False\n#text.usetex: True\n")
    assert Pictures(style=str(tmp_path / "fine.mplstyle")).style


def test_packages_are_of_versions_that_run_nothing_of_what_they_read():
    """matplotlib 3.10.9: axes.prop_cycle of a style file is no program any more; datasets 4: nor
    are data sets."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "matplotlib>=3.10.9" in project["dependencies"]
    assert project["optional-dependencies"]["huggingface"] == ["datasets>=4.0"]
