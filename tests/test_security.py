"""What fedexp reads cannot run code: no pickle but between its own processes, no unchecked
extraction, no eval."""

import ast
import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedexp.cli import completion
from fedexp.data.torchvision_files import Plain, read_plain
from fedexp.rundir import contents

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
# The engines' processes send each other pickles, over a socket pair or torch.distributed; CIFAR's
# files are read by an unpickler that builds nothing but arrays.
PICKLES = (
    "engine/processes/channel.py",
    "engine/processes/distributed.py",
    "data/torchvision_files.py",
)
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
    if path.as_posix().endswith(PICKLES):
        assert set(found) == {"import pickle"}
    else:
        assert found == []


def test_the_loader_of_yaml_files_makes_plain_values():
    for loader in (completion.LOADER, contents.LOADER):
        assert issubclass(loader, yaml.constructor.SafeConstructor)
        with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
            yaml.load("!!python/object/apply:os.getcwd []", Loader=loader)


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


def test_unpicklers_that_are_allowed_are_of_two_kinds():
    """Own processes' (which say so), and the one that only builds arrays."""
    for name in PICKLES:
        text = (ROOT / "src" / "fedexp" / name).read_text(encoding="utf-8")
        calls = {ast.unparse(n.func) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)}
        assert not {"pickle.load", "pickle.loads", "pickle.Unpickler"} & calls
    assert Plain.find_class is not pickle.Unpickler.find_class


# ---- CIFAR's pickles ----


class Thief:
    def __reduce__(self):
        return os.system, ("echo stolen > stolen",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_of_arrays_is_read_and_no_other(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = {"labels": [3, 1], "names": ["a", "ü"], "none": None, "number": 1.5}
    assert read_plain(io.BytesIO(pickle.dumps(wanted, protocol))) == wanted
    for bad in (Thief(), {"data": [Thief()]}, np.array([Thief()], object), print, Path("x")):
        with pytest.raises(pickle.UnpicklingError, match="which no data file needs"):
            read_plain(io.BytesIO(pickle.dumps(bad, protocol)))
    assert list(tmp_path.iterdir()) == []


def test_an_array_as_python_2_wrote_it():
    """The first lines of CIFAR's own files: names of the old module, the bytes as a text."""
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    state = b"(I1\n(I2\nI3\ntcnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\n"
    state += b"S'\\x00\\x01\\x02\\x03\\x04\\x05'\ntb."
    old = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR" + state
    np.testing.assert_array_equal(read_plain(io.BytesIO(old)), array)
