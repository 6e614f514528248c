"""`import fedexp`: runs and sweeps as DataFrames and models; run and evaluate."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from sklearn.datasets import load_digits

import fedexp
import quick_runs
from fedexp.analysis.evaluation import evaluate_run
from fedexp.analysis.frame import is_number
from fedexp.analysis.varying import varying_options
from fedexp.cli import main
from fedexp.cli.evaluate import read_dataset
from fedexp.core import storage
from fedexp.core.errors import ConfigError, HookFailed
from fedexp.core.rng import seeded
from fedexp.data.image_files import stratified_split
from fedexp.engine.base import Engine
from fedexp.rundir import files, kept_models
from fedexp.rundir.objective import declared_direction
from fedexp.rundir.reader import RunDirectory
from toy_federation import SETTINGS, TWO_TASKS, make_simulation

EXACT = ["hardware.precision=fp64", "checkpoint_interval=1"]
SMALL = [*quick_runs.SMALL, *EXACT]
# four rounds of a model that learns
LONGER = [*SMALL, "model.channels=[8]", "model.hidden=[16]", "rounds=4", "algorithm=fedntd"]


def train(directory: Path, *overrides: str) -> fedexp.Run:
    return fedexp.run([*SMALL, *overrides], directory=directory)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedexp.Run:
    """Four rounds; keep_models=2 keeps every second model in addition to the checkpoints."""
    kept = ["keep_models=2", "keep_local_models=[3]"]
    return fedexp.run([*LONGER, *kept], directory=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def test_set() -> tuple[torch.Tensor, np.ndarray]:
    """The digits' test images as a model reads them, made without fedexp."""
    digits = load_digits()
    _, test = stratified_split(digits.target, 0.2, 0)
    images = (digits.images[test] / 16 - 0.3054) / 0.3761
    return torch.from_numpy(images)[:, None], digits.target[test]


def test_import_is_lazy():
    """Neither torch nor pandas nor Hydra is imported before a name is used."""
    text = (
        "import sys, fedexp; print([m for m in ('torch', 'pandas', 'hydra', 'numpy') if m in"
        " sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist_and_are_documented():
    assert set(fedexp.__all__) <= set(dir(fedexp))
    assert all(getattr(fedexp, name).__doc__ for name in fedexp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'load_runs'"):
        _ = fedexp.load_runs


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("Evaluation", "`fedexp evaluate <run> --out classes.csv`"),
        ("evaluate", "`fedexp evaluate <run> --out classes.csv`"),
        ("export", "torch.save(run.model().network.state_dict(), path)"),
        ("sweep", "`fedexp --multirun`, then fedexp.load_sweep(directory)"),
    ],
)
def test_removed_names_are_refused_with_what_replaces_them(name: str, use: str):
    with pytest.raises(AttributeError) as error:
        getattr(fedexp, name)
    assert str(error.value) == f"module 'fedexp' has no attribute {name!r}; use {use}"


# --- a run


def test_loaded_run_equals_its_files(run):
    again = fedexp.load_run(run.directory)
    assert again.status == "completed"
    assert again.summary == json.loads((run.directory / "summary.json").read_text())
    assert again.config == yaml.safe_load((run.directory / "config.yaml").read_text())
    assert again.overrides[0] == SMALL[0]
    table = pd.read_csv(run.directory / "rounds.csv")
    pd.testing.assert_frame_equal(again.rounds, table, check_dtype=False)
    assert again.rounds["test_accuracy"].iloc[-1] == again.summary["accuracy"]
    classes = again.class_accuracy
    assert list(classes) == ["round", "class", "name", "accuracy"]
    assert len(classes) == 5 * 10
    assert list(classes["name"][:3]) == ["0", "1", "2"]
    assert again.partition.counts.sum() == 1437 == sum(len(part) for part in again.partition.parts)
    assert len(again.clients) == 4 * 4
    noted = json.loads((run.directory / "origin.json").read_text())
    assert noted["shape"] == [8, 8, 1]  # the height, width and channels of a digit


@pytest.mark.parametrize("number", [None, 2, 3, 4])
def test_loaded_model_has_the_accuracy_of_the_round(run, test_set, number):
    """In fp64, the class accuracies computed here with torch equal class_accuracy.csv."""
    images, labels = test_set
    model = run.model(number)
    assert isinstance(model, torch.nn.Module)
    assert not model.training
    with torch.no_grad():
        logits = model(images.double())
    assert logits.shape == (360, 10)
    right = logits.argmax(1).numpy() == labels
    wanted = run.class_accuracy.query(f"round == {number or 4}")["accuracy"].to_numpy()
    assert [right[labels == c].mean() for c in range(10)] == pytest.approx(
        wanted.tolist(), abs=1e-12
    )


def test_models_of_selected_rounds_are_saved(run):
    """keep_models=2 keeps every second model; the checkpoints keep the last two."""
    assert run.kept_rounds == [2, 3, 4]
    with pytest.raises(
        ConfigError, match=r"round 1 was not saved; saved rounds: 2, 3, 4; .*keep_models=<n>"
    ):
        run.model(1)


def test_local_models_of_selected_rounds_are_saved(run):
    """Their mean weighted by examples (FedNTD Eq. 2) is the global model after the round. The
    global models before and after the round are kept too. A file has the size of one model."""
    clients = run.kept_clients(3)
    rows = run.clients.query("round == 3").set_index("client")["examples"]
    assert clients == sorted(rows.index)
    models = [run.model(3, client).state_dict() for client in clients]
    weights = rows[clients].to_numpy() / rows.sum()
    for name, value in run.model(3).state_dict().items():
        mean = sum(w * model[name] for w, model in zip(weights, models, strict=True))
        torch.testing.assert_close(mean, value, rtol=1e-12, atol=1e-14)
    sizes = [path.stat().st_size for path in (run.directory / "models").glob("*.pt")]
    assert len(sizes) == 3 + len(clients)  # of rounds 2, 3 and 4
    assert max(sizes) < 1.05 * min(sizes)
    with pytest.raises(
        ConfigError, match="the model of client 99 from round 3 was not saved; to save the local"
    ):
        run.model(3, client=99)
    with pytest.raises(
        ConfigError,
        match=r"from round 2 was not saved; saved rounds: 3; .*keep_local_models=\[<rounds>\]",
    ):
        run.model(2, client=clients[0])


@pytest.mark.parametrize(
    ("kept", "local", "rounds"),
    [
        (2, None, [2, 4]),
        ([0, 3], None, [0, 3]),
        (None, [1, 4], [0, 1, 3, 4]),
        (None, 3, [2, 3]),
        (None, None, []),
    ],
)
def test_global_model_is_kept_in_and_around_chosen_rounds(kept, local, rounds):
    """They are the rounds of keep_models, and those before and after each round of
    keep_local_models."""
    settings = replace(SETTINGS, keep_models=kept, keep_local_models=local)
    assert [number for number in range(5) if settings.keeps_model(number)] == rounds


@pytest.mark.parametrize("wrong", [0, "all", True, [], [0], [1, "2"]])
def test_invalid_keep_local_models_is_rejected(wrong):
    with pytest.raises(
        ConfigError,
        match=r"keep_local_models=.*must be n to save each n-th round, a list of rounds from 1",
    ):
        replace(SETTINGS, keep_local_models=wrong)


@pytest.mark.parametrize("key", ["keep_models", "keep_local_models"])
def test_keeping_models_after_last_round_is_rejected(key):
    """The last round is that of all tasks. An interval may be longer than the run."""
    with pytest.raises(ConfigError, match=rf"{key}: round 99 is after the last round \(rounds=3\)"):
        make_simulation(**{key: [1, 99]})
    make_simulation(**{key: 99})
    make_simulation(scenario=TWO_TASKS, rounds=2, **{key: [4]})
    with pytest.raises(ConfigError, match=rf"{key}: round 5 is after the last round \(rounds=4\)"):
        make_simulation(scenario=TWO_TASKS, rounds=2, **{key: [5]})


def test_directory_without_a_run_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        fedexp.load_run(tmp_path)
    with pytest.raises(ConfigError, match="contains no run"):
        fedexp.load_sweep(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        fedexp.load_sweep(tmp_path / "nowhere")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rounds.csv").touch()
    with pytest.raises(ConfigError, match="load its 1 run with load_sweep"):
        fedexp.load_run(tmp_path)


# --- run


@contextmanager
def changed_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def changed_process():
    """Set what a run sets for the whole process."""
    backends = torch.backends
    before = torch.get_num_threads(), backends.cuda.matmul.allow_tf32, backends.cudnn.deterministic
    torch.set_num_threads(2)
    backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        backends.cuda.matmul.allow_tf32, backends.cudnn.deterministic = before[1:]


SHORT = [*quick_runs.SMALL, "rounds=1"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return fedexp.run(SHORT, directory=tmp_path_factory.mktemp("plain") / "run").rounds


@pytest.mark.parametrize(
    "changed",
    [
        changed_dtype,
        changed_process,
        pytest.param(torch.no_grad, marks=pytest.mark.slow),
        torch.inference_mode,
        partial(torch.device, "meta"),
        pytest.param(partial(torch.autocast, "cpu", torch.bfloat16), marks=pytest.mark.slow),
    ],
)
def test_settings_of_torch_do_not_change_a_run(changed, plain, tmp_path):
    """In a notebook, torch may have another default dtype, for example. It has it afterwards."""

    def settings():
        ones = torch.ones(1)
        kind = (ones + ones).dtype, ones.device, (torch.eye(2) @ torch.eye(2)).dtype
        backends = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.deterministic
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return kind, modes, backends, torch.get_num_threads()

    with changed():
        before = settings()
        other = fedexp.run(SHORT, directory=tmp_path / "other")
        assert settings() == before
        assert next(other.model().parameters()).dtype == torch.float32
    columns = ["train_loss", "test_loss", "test_accuracy"]
    pd.testing.assert_frame_equal(plain[columns], other.rounds[columns], check_exact=True)


def test_every_number_of_a_summary_has_a_direction(tmp_path):
    """The objective of a search, and the best value in a table, depend on it."""
    whole = ["forgetting_metric=[all,events,alignment]", "evaluate=[global,personal]"]
    views = ["validation.fraction=0.2", "evaluate_on=both", "algorithm=fedrep", "rounds=1"]
    summaries = [train(tmp_path / "views", *whole, *views).summary]
    tasks = ["scenario=class_incremental", "scenario.num_tasks=2", "dataset.augmentation.flip=true"]
    views = ["test_views=[plain,augmented]", "rounds=1"]
    summaries.append(train(tmp_path / "tasks", *tasks, *whole, *views).summary)
    values = {key: value for summary in summaries for key, value in summary.items()}
    numbers = {key for key, value in values.items() if value is None or is_number(value)}
    numbers.discard("commit")  # None without a checkout of git, otherwise text
    assert {key for key in numbers if declared_direction(key) is None} == {"seed", "sweep"}


def test_python_run_equals_command_line_run(run, tmp_path, monkeypatch):
    """The tables are equal except for times, and so is the identity."""
    monkeypatch.setattr(sys, "argv", ["fedexp"])
    arguments = [*LONGER, f"hydra.run.dir={tmp_path / 'other'}"]
    assert main.main(arguments) == 0
    other = fedexp.load_run(tmp_path / "other")
    steady = [name for name in run.rounds if not name.endswith(("seconds", "_per_second"))]
    pd.testing.assert_frame_equal(run.rounds[steady], other.rounds[steady])
    assert other.summary["identity"] == run.summary["identity"]
    assert (other.directory / "class_accuracy.csv").read_bytes() == (
        run.directory / "class_accuracy.csv"
    ).read_bytes()
    assert other.kept_rounds == [3, 4]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=fedntdd"], ["algorithm=fedntdd: no such option (nearest: 'fedntd')"]),
        (["--multirun"], ["--multirun: must be an override (key=value), not a flag"]),
        (["dataset._target_=os.system"], ["dataset._target_=os.system"]),
        ("rounds=1", ["must be a list of overrides"]),
        ([5], ["must be a string"]),
    ],
)
def test_bad_input_is_one_error_and_leaves_no_files(overrides, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = overrides if isinstance(overrides, str) else ["tracker=none", *overrides]
    with pytest.raises(ConfigError) as error:
        fedexp.run(given)
    assert all(word in str(error.value) for word in words), error.value
    assert os.listdir(tmp_path) == []


EVERYTHING = (
    "rounds=1",
    "forgetting_metric=all",
    "analysis=[weight_divergence,cka]",
    "keep_models=1",
    "keep_local_models=[1]",
    "algorithm=scaffold",  # has client states
    "figures=true",
)


def contents_of(directory: Path) -> set[str]:
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    return found - {".lock"}


def test_overwrite_deletes_only_files_of_the_old_run(tmp_path, monkeypatch):
    there = tmp_path / "run"
    first = train(there, *EVERYTHING)
    (there / "wandb").mkdir()
    (there / "wandb/debug.log").touch()  # as of tracker=wandb
    before = contents_of(there)
    own = {
        "notes.md",
        "client_results_notes.csv",
        "analysis/mine.png",
        "figures/mine.png",
        "models/round_best.pt",
        "other/config.yaml",
    }
    for name in own:
        (there / name).parent.mkdir(exist_ok=True)
        (there / name).write_text("mine")
    aside = tmp_path / ".run.overwritten"
    aside.mkdir()
    (aside / "rounds.csv").touch()
    with pytest.raises(ConfigError, match="the number of training examples"):
        fedexp.run([*SMALL, "rounds=1", "num_clients=2000"], directory=there, overwrite=True)

    def start(engine, runtime):
        raise ConfigError("rank 1 on b: the data are missing")

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "start", start)
        with pytest.raises(ConfigError, match="rank 1 on b"):
            fedexp.run([*SMALL, "rounds=1"], directory=there, overwrite=True)
    assert contents_of(there) == before | own
    assert fedexp.load_run(there).summary == first.summary
    second = fedexp.run([*SMALL, "rounds=2"], directory=there, overwrite=True)
    assert second.summary["rounds"] == 2
    plain = contents_of(train(tmp_path / "plain", "rounds=2").directory)
    assert contents_of(there) == plain | own
    assert contents_of(aside) == {"rounds.csv"}


def test_overwrite_conflicts_are_rejected(run, tmp_path, monkeypatch):
    def overwrite(message: str, *overrides: str, directory: Path = run.directory) -> None:
        with pytest.raises(ConfigError, match=message):
            fedexp.run([*SMALL, "rounds=1", *overrides], directory=directory, overwrite=True)

    with pytest.raises(ConfigError, match=r"overwrite=True: needs directory=<run directory>"):
        fedexp.run(SMALL, overwrite=True)
    before = contents_of(run.directory)
    overwrite("starts a new run, but resume= continues", f"resume={run.directory}")
    (tmp_path / "link").symlink_to(run.directory)
    overwrite("is a link", directory=tmp_path / "link")
    (run.directory / "inside").symlink_to(run.directory / "checkpoint")
    overwrite("contains the link inside")
    (run.directory / "inside").unlink()
    (run.directory / "multirun.yaml").touch()
    overwrite("is the directory of a sweep")
    (run.directory / "multirun.yaml").unlink()
    monkeypatch.chdir(run.directory / "checkpoint")
    overwrite("contains the working directory")
    assert contents_of(run.directory) == before
    assert run.status == "completed"


def test_hydra_state_is_restored(tmp_path):
    """An application's Hydra and its configuration are not changed."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "config.yaml").write_text("x: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        with pytest.raises(ConfigError):
            fedexp.run(["rounds=0"])
        assert GlobalHydra.instance().is_initialized()
        assert hydra.compose("config") == {"x": 1}


def test_failed_run_records_error(tmp_path):
    """If a user's aggregation raises, the exception is raised here, and error.txt contains it."""
    (tmp_path / "conf" / "algorithm").mkdir(parents=True)
    (tmp_path / "conf/algorithm/broken.yaml").write_text("_target_: broken_for_python.Broken\n")
    module = tmp_path / "broken_for_python.py"
    module.write_text(
        "from dataclasses import dataclass\nfrom fedexp.algorithms.base import"
        " FedAvg\n\n\n@dataclass(frozen=True, kw_only=True)\nclass Broken(FedAvg):\n    def"
        " aggregate(self, server, messages, round):\n        raise RuntimeError('the aggregation"
        " broke')\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        where = r"algorithm: aggregate of Broken \(broken_for_python.py, line 8\): RuntimeError: "
        with pytest.raises(HookFailed, match=where + "the aggregation broke"):
            fedexp.run(
                [*SMALL, "algorithm=broken"],
                directory=tmp_path / "run",
                config_dir=tmp_path / "conf",
            )
        failed = fedexp.load_run(tmp_path / "run", config_dir=tmp_path / "conf")
        assert failed.status == "failed"
        assert "the aggregation broke" in (tmp_path / "run" / "error.txt").read_text()
        assert failed.model(0).network is not None  # of the initial model, which was saved
        with pytest.raises(ConfigError, match=r"is not a fedexp class; .*in Python config_dir="):
            fedexp.load_run(tmp_path / "run").model(0)
    finally:
        sys.path.remove(str(tmp_path))


# --- evaluate


def evaluate(run, *overrides: str, number: int | None = None):
    """Evaluate a model as `fedexp evaluate` does."""
    return evaluate_run(RunDirectory(run.directory), read_dataset(overrides), number, "cpu")


@pytest.mark.parametrize("held_out", ["test_per_client=0.25", "partition.path"])
def test_evaluate_tests_on_the_examples_that_clients_held_out(held_out, tmp_path):
    """Not on the test set of the data set, whose examples clients may have trained on."""
    given = [*SMALL, "rounds=2", "dataset.train_splits=[train,test]"]
    if held_out == "partition.path":
        clients = {
            str(client): {
                "train": [*range(client, 800, 8)],
                "test": [*range(900 + client, 1700, 8)],
            }
            for client in range(8)
        }
        (tmp_path / "clients.json").write_text(json.dumps(clients))
        given = [each for each in given if not each.startswith("min_size")]
        given += ["partition=file", f"partition.path={tmp_path / 'clients.json'}"]
    else:
        given.append(held_out)
    made = fedexp.run(given, directory=tmp_path / "run")
    found = evaluate(made)
    assert found.accuracy == pytest.approx(made.summary["accuracy"], abs=1e-12)
    assert found.loss == pytest.approx(made.rounds["test_loss"].iloc[-1], rel=1e-9)


def test_evaluate_equals_results_of_run(run, capsys, tmp_path):
    found = evaluate(run)
    assert (found.dataset, found.round, found.examples) == ("digits", 4, 360)
    assert found.accuracy == pytest.approx(run.summary["accuracy"], abs=1e-12)
    assert found.loss == pytest.approx(run.rounds["test_loss"].iloc[-1], rel=1e-9)
    wanted = run.class_accuracy.query("round == 4")["accuracy"]
    assert found.classes["accuracy"].tolist() == pytest.approx(wanted.tolist(), abs=1e-12)
    assert found.classes["examples"].sum() == 360
    assert evaluate(run, number=2).accuracy == run.rounds["test_accuracy"][2]
    table = tmp_path / "classes.csv"
    assert (
        main.main(
            ["evaluate", str(run.directory), "dataset=digits", "--round", "2", "--out", str(table)]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "digits, 360 test examples, model after round 2: accuracy"
        f" {run.rounds['test_accuracy'][2]:.4f}" in said
    )
    written = pd.read_csv(table)
    assert list(written) == ["class", "name", "examples", "correct", "accuracy"]
    assert (written["correct"] / written["examples"]).tolist() == pytest.approx(
        written["accuracy"].tolist()
    )


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_evaluate_normalises_images_as_pretrained_weights_require(library, tmp_path):
    pytest.importorskip(library)
    given = ["model=timm", "model.name=test_vit", "model.image_size=32"]
    if library == "torchvision":
        from torchvision.models import shufflenet_v2_x0_5

        with seeded(3):
            network = shufflenet_v2_x0_5()
            for layer in network.modules():
                if isinstance(layer, torch.nn.BatchNorm2d):
                    layer.momentum = None  # the running statistics are those of one batch
            network(torch.rand(8, 3, 32, 32))
        torch.save(network.state_dict(), tmp_path / "weights.pth")
        given = ["model=torchvision", "model.name=shufflenet_v2_x0_5", "model.image_size=32"]
        given += [f"model.weights={tmp_path / 'weights.pth'}", "model.freeze=[backbone]"]
    small = [*quick_runs.FEDERATION, *EXACT, "local.batch_size=60", "num_clients=20"]
    made = fedexp.run([*small, "rounds=1", *given], directory=tmp_path / "run")
    found = evaluate(made)
    assert found.accuracy == pytest.approx(made.summary["accuracy"], abs=1e-12)
    assert found.loss == pytest.approx(made.rounds["test_loss"].iloc[-1], rel=1e-9)


def test_evaluate_refuses_a_run_without_a_global_model(tmp_path, capsys):
    fedexp.run([*SMALL, "rounds=1", "algorithm=local_only"], directory=tmp_path / "run")
    assert main.main(["evaluate", str(tmp_path / "run"), "--device=cpu"]) == 2
    assert "LocalOnly has no global model; it saves the initial one" in capsys.readouterr().err


def image_folder(root: Path, images: np.ndarray, labels: np.ndarray, names: list[str]) -> list[str]:
    """Write a tree of grey images, and return the overrides that name it."""
    from PIL import Image

    for split in ("train", "test"):
        for k, (image, label) in enumerate(zip(images, labels, strict=True)):
            folder = root / split / names[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{k}.png")
    return [f"dataset.root={root}", "dataset.mean=[0.9]", "dataset.std=[0.5]"]


def test_evaluate_matches_classes_by_name(run, tmp_path):
    """The order of the folders differs from that of the labels. Unknown class names are rejected if
    their number differs."""
    digits = load_digits()
    chosen = np.flatnonzero(np.isin(digits.target, [7, 9]))[:20]
    images = (digits.images[chosen] * 15).astype(np.uint8)
    overrides = image_folder(
        tmp_path / "a", images, (digits.target[chosen] == 9).astype(int), ["7", "9"]
    )
    found = evaluate(run, "dataset=image_folder", *overrides, f"data_dir={tmp_path}")
    assert found.classes["examples"][7] == (digits.target[chosen] == 7).sum()
    assert found.classes["examples"][9] == (digits.target[chosen] == 9).sum()
    assert found.classes["accuracy"].drop([7, 9]).isna().all()
    overrides = image_folder(
        tmp_path / "b", images, (digits.target[chosen] == 9).astype(int), ["cat", "dog"]
    )
    with pytest.raises(
        ConfigError, match=r"2 classes \(cat, \.\.\.\), and the run has 10 \(0, \.\.\. of digits\)"
    ):
        evaluate(run, "dataset=image_folder", *overrides, f"data_dir={tmp_path}")


def test_evaluate_compares_by_position_only_on_request(run, capsys, tmp_path):
    """The class 3 is named three, so the names sort otherwise. Only the test folder is needed."""
    digits = load_digits()
    images, labels = (digits.images[:60] * 15).astype(np.uint8), digits.target[:60]
    names = ["three" if k == 3 else str(k) for k in range(10)]
    options = image_folder(tmp_path / "own", images, labels, names)
    shutil.rmtree(tmp_path / "own" / "train")
    command = ["evaluate", str(run.directory), "dataset=image_folder", *options]
    command += [f"data_dir={tmp_path}", "--device=cpu"]
    assert main.main(command) == 2
    said = capsys.readouterr().err
    assert "only this data set has three, and only the run has 3; --by-position compares" in said
    (tmp_path / "own" / "test" / "three").rename(tmp_path / "own" / "test" / "3")
    assert main.main(command) == 0
    by_name = capsys.readouterr().out
    assert main.main([*command, "--by-position"]) == 0
    assert capsys.readouterr().out == by_name  # the same order
    assert f"image_folder, {len(labels)} test examples" in by_name
    assert main.main(["evaluate", str(run.directory), "--by-position"]) == 2
    assert "--by-position: is for another data set" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "own" / "test" / "3")
    assert main.main([*command, "--by-position"]) == 2
    assert "has 9 classes (0, ...), but the run has 10" in capsys.readouterr().err


@pytest.mark.slow
def test_evaluate_works_for_a_run_with_task_heads(tmp_path):
    """The heads of randomly drawn tasks are read from the directory. On another test set, an
    example's class determines its task; all 360 digits of the test part are used."""
    stream = [
        "scenario=class_incremental",
        "scenario.num_tasks=5",
        "scenario.rounds_per_task=1",
        "partition=iid",
    ]
    stream += ["scenario.shuffle_classes=true"]
    small = [option for option in SMALL if not option.startswith("min_size")]
    done = fedexp.run(
        [*small, *stream, "algorithm=fedmultihead", "num_clients=4"], directory=tmp_path / "run"
    )
    found = evaluate(done)
    assert found.accuracy == pytest.approx(done.summary["accuracy"], abs=1e-12)
    wanted = done.class_accuracy.query("round == 5")["accuracy"]
    assert found.classes["accuracy"].tolist() == pytest.approx(wanted.tolist(), abs=1e-12)
    other = evaluate(done, "dataset=digits")
    assert other.examples == 360
    # Told the task, a model chooses between two classes; a single head of ten with as little
    # training is far below.
    assert other.accuracy > 0.4


@pytest.mark.slow
def test_evaluate_works_for_a_run_on_texts(tmp_path):
    """The run's vocabulary is used for another set of texts, even if that set would make another
    vocabulary."""
    rng = np.random.default_rng(0)
    words = [chr(0x4E00 + k) for k in range(30)]
    for name, first in (("thucnews", 0), ("sina2019", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "class.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
        for split in ("train", "test"):
            lines = [
                f"{words[first + 5 * (k % 3) + rng.integers(5)] * 4}\t{k % 3}" for k in range(60)
            ]
            (tmp_path / name / f"{split}.txt").write_text("\n".join(lines), encoding="utf-8")
    own = [
        "dataset=thucnews",
        "model=textcnn",
        "dataset.vocabulary=null",
        "dataset.vectors=null",
        "rounds=2",
    ]
    small = [option for option in quick_runs.FEDERATION if not option.startswith("num_clients")]
    small += [*EXACT, "local.batch_size=60", "num_clients=4", f"data_dir={tmp_path}"]
    done = fedexp.run([*small, *own], directory=tmp_path / "run")
    found = evaluate(done)
    assert found.accuracy == pytest.approx(done.summary["accuracy"], abs=1e-12)
    again = evaluate(done, "dataset=thucnews", *own[2:4], f"data_dir={tmp_path}")
    assert again.accuracy == found.accuracy
    other = evaluate(done, "dataset=sina2019", f"data_dir={tmp_path}")
    assert (other.dataset, other.examples) == ("sina2019", 60)
    words_of_the_run = done.model().network.embedding.weight.shape[0]
    assert words_of_the_run < 30  # some of the other's are unknown to it


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dataset=digitz"], "dataset=digitz: no such option (nearest: 'digits')"),
        (["rounds=3"], "rounds: only dataset, its keys"),
        (["dataset.name=x"], "can be set only together with dataset=<option>"),
        (["--round", "1"], "the global model from round 1 was not saved"),
        (["--device", "cpux"], "hardware.device=cpux"),
        (["dataset=thucnews"], "contains text"),
    ],
)
def test_evaluate_rejects_bad_input(run, arguments, words, capsys):
    assert main.main(["evaluate", str(run.directory), *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out


# --- a directory from someone else


def copied(run: fedexp.Run, target: Path, **changes: object) -> Path:
    """Copy a run with another configuration."""

    shutil.copytree(run.directory, target)
    (target / files.CHECKSUMS).unlink()
    (target / files.CONFIG).write_text(yaml.safe_dump({**run.config, **changes}))
    return target


def test_foreign_class_is_not_called(run, tmp_path):
    other = copied(
        run, tmp_path / "a", model={"_target_": "subprocess.Popen", "args": ["touch", "x"]}
    )
    with pytest.raises(
        ConfigError,
        match=r"config\.yaml: model\._target_=subprocess\.Popen: is not a fedexp class",
    ):
        fedexp.load_run(other).model()


def test_pickle_is_not_loaded(run, tmp_path):
    class Thief:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'stolen'}",)

    other = copied(run, tmp_path / "a")
    for name in (files.CHECKPOINT, files.PREVIOUS, kept_models.file_of_round(4)):
        torch.save({"round": 4, "params": Thief(), "buffers": {}}, other / name)
    for number in (None, 4):
        with pytest.raises(ConfigError, match="cannot be read"):
            fedexp.load_run(other).model(number)
    assert not (tmp_path / "stolen").exists()


def test_checkpoint_of_another_format_is_named(tmp_path):
    storage.save_tree(tmp_path / files.CHECKPOINT, {"format": 1, "round": 4})
    models, (problem,) = kept_models.from_checkpoints(tmp_path)
    assert models == []
    assert problem.startswith(f"{tmp_path / files.CHECKPOINT}: is not a checkpoint for this")


def test_model_of_other_shape_is_rejected(run, tmp_path):
    small = copied(run, tmp_path / "a", model={**run.config["model"], "hidden": [7]})
    with pytest.raises(ConfigError, match=r"round 4 does not match config\.yaml"):
        fedexp.load_run(small).model()
    huge = copied(run, tmp_path / "b", model={**run.config["model"], "hidden": [2**40]})
    with pytest.raises(ConfigError, match="free memory"):
        fedexp.load_run(huge).model()


# --- a sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two algorithms, two seeds, and a failed job."""
    directory = tmp_path_factory.mktemp("sweep")
    for algorithm in ("fedavg", "fedntd"):
        for seed in (0, 1):
            given = ["rounds=1", f"algorithm={algorithm}", f"seed={seed}", "evaluate=personal"]
            train(directory / f"{algorithm}_{seed}", *given)
    failed = directory / "gone"
    failed.mkdir()
    (failed / "summary.json").write_text('{"status": "failed", "error": "x", "exit_code": 1}')
    return directory


def test_sweep_has_tables_of_runs_and_rounds(sweep):
    found = fedexp.load_sweep(sweep)
    assert found.names == ["fedavg_0", "fedavg_1", "fedntd_0", "fedntd_1", "gone"]
    runs = found.runs
    done = runs.drop("gone")
    assert done["algorithm"].tolist() == ["fedavg", "fedavg", "fedntd", "fedntd"]
    assert done["seed"].tolist() == [0, 1, 0, 1]
    assert runs["status"].tolist() == ["completed"] * 4 + ["failed"]
    assert done["accuracy"].tolist() == [
        run.summary["accuracy"] for run in found if run.status == "completed"
    ]
    assert np.isnan(runs["accuracy"]["gone"])
    assert not runs.columns.duplicated().any()
    rounds = found.rounds
    assert rounds.index.tolist() == list(range(4 * 2))  # without the numbers from each file
    means = rounds[rounds["round"] == 1].groupby("algorithm")["test_accuracy"].mean()
    assert means["fedntd"] == pytest.approx(done.query("algorithm == 'fedntd'")["accuracy"].mean())
    assert found["fedntd_1"].summary["seed"] == 1
    with pytest.raises(ConfigError, match=r"no run fedntd_9 \(nearest: 'fedntd_"):
        found["fedntd_9"]


def test_select_returns_the_runs_with_given_options(sweep):
    found = fedexp.load_sweep(sweep)
    assert found.select(algorithm="fedntd", seed=1).names == ["fedntd_1"]
    assert found.select(algorithm="fedntd", seed=1)[0].summary["seed"] == 1
    assert found.select({"local.epochs": 1}, seed=0).names == ["fedavg_0", "fedntd_0"]
    with pytest.raises(ConfigError, match=r"no run has seed=7; existing values: 0, 1, None"):
        found.select(seed=7)
    with pytest.raises(ConfigError, match=r"no run has algoritm=fedavg \(nearest: 'algorithm'\)"):
        found.select(algoritm="fedavg")


def test_sweep_has_only_the_runs_of_its_jobs(here, sweep, capsys):
    """The directory, which is renamed, also has a copy and two runs that no sweep made."""
    command = ["--multirun", *SMALL, "rounds=1"]
    assert main.main([*command, "hydra.sweep.dir=old", "seed=0"]) == 0
    (here / "old").rename(here / "mine")
    assert main.main([*command, "hydra.sweep.dir=mine", "seed=1"]) == 0
    (second,) = (here / "mine").glob("*_seed1_*")
    shutil.copytree(second, here / "mine" / "z_copy")
    shutil.copytree(sweep / "fedntd_1", here / "mine" / "single")
    assert train(here / "mine" / "other", "rounds=1").summary["sweep"] is None
    capsys.readouterr()
    loaded = fedexp.load_sweep("mine")
    assert loaded.runs["seed"].tolist() == [0, 1]
    told = capsys.readouterr().err
    for name in ("single", "other"):
        assert f"mine: left out: {name} was not made by the sweep mine" in told
    assert f"mine: left out: z_copy has the configuration of {second.name}" in told
    assert main.main(["report", "mine", "--no-figures"]) == 0
    table = pd.read_csv("mine/table.csv")
    assert table["seeds"].tolist() == ["0 1"]
    (first,) = (here / "mine").glob("*_seed0_*")
    assert main.main([f"resume={first}", "rounds=2"]) == 0  # which changes its identity
    assert fedexp.load_sweep("mine").runs["rounds"].tolist() == [2, 1]


def test_varying_options_are_those_that_differ_between_runs():
    """alpha is shown once; beta belongs to FedNTD and is equal in its runs; tau differs between two
    runs. Options without effect (figures) and common options (rounds) are left out."""

    def config(algorithm: str, alpha: float, **own: float) -> dict:
        node = {"_target_": f"x.{algorithm}", **own}
        base = {
            "choices": {"algorithm": algorithm, "tuned": f"digits_{algorithm}"},
            "rounds": 3,
            "figures": alpha > 1,
        }
        return base | {
            "alpha": alpha,
            "partition": {"alpha": alpha},
            "algorithm": node,
            "test_views": ["plain"],
        }

    configs = [
        config("fedavg", 0.1),
        config("fedntd", 0.1, beta=1.0, tau=1.0),
        config("fedntd", 2.0, beta=1.0, tau=3.0),
    ]
    assert varying_options(configs) == [
        {"algorithm": "fedavg", "alpha": 0.1, "algorithm.tau": None},
        {"algorithm": "fedntd", "alpha": 0.1, "algorithm.tau": 1.0},
        {"algorithm": "fedntd", "alpha": 2.0, "algorithm.tau": 3.0},
    ]
    assert varying_options([]) == []
    assert varying_options([config("fedavg", 0.1), {}]) == [{}, {}]
    tasks = [{"scenario": {"classes": [[0, 1], [2, second]]}} for second in (3, 4)]
    assert varying_options(tasks) == [
        {"scenario.classes": ((0, 1), (2, second))} for second in (3, 4)
    ]
