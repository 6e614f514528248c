"""Every option composes and builds, and errors in a configuration are reported once and completely.

`python tests/test_build.py --write` writes golden/options.txt, the list of all options, and
golden/experiments.txt, a hash of the values of each experiment, and adds the identities of new
options to golden/identities.txt.
"""

import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from omegaconf import OmegaConf

from fedexp.algorithms.base import FedAvg
from fedexp.config.build import GROUPS, build
from fedexp.config.options import MULTIPLE, known_keys, list_groups, list_options
from fedexp.config.values import convert, find_class, make_target
from fedexp.core.errors import ConfigError
from fedexp.data.types import TextShape
from fedexp.rundir.identity import digest, essential, result_values
from toy_federation import CONF, CONFS, composed, conf_file

SURFACE = Path(__file__).parent / "golden" / "options.txt"
EXPERIMENTS = SURFACE.with_name("experiments.txt")  # hashes of their values
# The identity of a run with each option. A line is added for a new option and never changes, since
# sweeps would run their finished jobs again.
IDENTITIES = SURFACE.with_name("identities.txt")
OPTIONS = {group: list_options(group, CONFS) for group in list_groups(CONFS)}
# An option of every group, until each has been had. The identities build the other algorithms.
OPTIONS["algorithm"].sort(
    key=lambda name: "\ndefaults:" not in conf_file(f"algorithm/{name}").read_text("utf-8")
)
TOGETHER = [
    {group: options[i % len(options)] for group, options in OPTIONS.items()}
    for i in range(max(len(options) for group, options in OPTIONS.items() if group != "algorithm"))
]
NEEDED = {"file": ["partition.path=parts.json"]}  # options that are incomplete by themselves


def errors_of(*overrides: str) -> list[str]:
    """Return the lines of the ConfigError for a configuration."""
    with pytest.raises(ConfigError) as error:
        build(composed(*overrides))
    return str(error.value).splitlines()


def together(chosen: dict[str, str]) -> Any:
    needed = [override for option in chosen.values() for override in NEEDED.get(option, [])]
    return composed(*(f"{group}={option}" for group, option in chosen.items()), *needed)


# --- every option


def test_every_config_group_is_built():
    assert list_groups(CONFS) == sorted(GROUPS)


@pytest.mark.parametrize("chosen", TOGETHER, ids=lambda chosen: chosen["algorithm"])
def test_every_option_composes_and_builds(chosen):
    built = build(config := together(chosen))
    for group in chosen:
        nodes = config[group].values() if group in MULTIPLE else [config[group]]
        made = getattr(built, group) if group in MULTIPLE else [getattr(built, group)]
        classes = [find_class(node["_target_"], group) for node in nodes]
        assert [type(each) for each in made] == classes


SLOW = ("resnet50", "timm", "timm_lora", "torchvision", "torchvision_lora")


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(option, marks=pytest.mark.slow if option in SLOW else ())
        for option in list_options("model", CONFS)
    ],
)
def test_every_model_runs_on_colour_images_or_texts(option):
    if option in ("timm", "timm_lora"):
        pytest.importorskip("timm")
    model = build(composed(f"model={option}")).model
    if model.reads == "images":
        output = (network := model.build((3, 32, 32), 7))(torch.zeros(2, 3, 32, 32))
    else:
        output = (network := model.build(TextShape(32, 50, None), 7))(
            torch.zeros(2, 32, dtype=torch.int64)
        )
    assert output.logits.shape == (2, 7)
    norms = [m for m in network.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert model.mixes_examples == bool(norms)


def test_every_option_is_listed():
    """New, renamed and removed options appear in the diff."""
    found = set(known_keys()) ^ {*SURFACE.read_text(encoding="utf-8").splitlines()}
    assert not found, "new or lost options; note them with `python tests/test_build.py --write`"


HASHES = dict(line.split() for line in EXPERIMENTS.read_text(encoding="utf-8").splitlines())
FEW = ("cfed/image_class", "fedka/tiny_imagenet", "fedntd/mnist_s2", "flashback/femnist_3432")


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in HASHES]
)
def test_experiments_keep_their_values(name):
    assert hash_of(name) == HASHES[name]


def hash_of(experiment: str) -> str:
    """Return a hash of all values of an experiment, with classes by their names only."""
    values = result_values(
        OmegaConf.to_container(composed(f"experiment={experiment}"), resolve=True)
    )
    return digest(
        {k: v.rpartition(".")[2] if k.endswith("_target_") else v for k, v in values.items()}
    )


def test_every_experiment_has_its_hash():
    assert list(HASHES) == list_options("experiment", CONFS)
    assert not any("_protocol" in name for name in HASHES)


def test_list_of_options_has_every_composed_key():
    known = set(known_keys())

    def keys(node: dict[str, Any], prefix: str = "") -> set[str]:
        found = {prefix + name for name in node}
        return found.union(
            *(keys(v, f"{prefix}{k}.") for k, v in node.items() if isinstance(v, dict))
        )

    for chosen in TOGETHER:
        assert keys(OmegaConf.to_container(together(chosen))) <= known, chosen


FROZEN = dict(line.split() for line in IDENTITIES.read_text(encoding="utf-8").splitlines())
SELECTED = [f"{group}={option}" for group in list_groups(CONFS) for option in OPTIONS[group]]
SELECTED += [f"experiment={name}" for name in HASHES]


def identity_of(selected: str) -> str:
    option = selected.partition("=")[2]
    return digest(essential(build(composed(selected, *NEEDED.get(option, [])))))


@pytest.mark.parametrize("group", [*list_groups(CONFS), "experiment"])
def test_identities_stay_as_they_are(group):
    selected = [each for each in SELECTED if each.startswith(f"{group}=")]
    assert {each: identity_of(each) for each in selected} == {
        each: identity for each, identity in FROZEN.items() if each.startswith(f"{group}=")
    }


# --- values that reach the objects


def test_seed_is_the_default_of_all_seeds():
    seeds = build(composed("seed=3", "seeds.sampling=5")).seeds
    assert (seeds.partition, seeds.sampling, seeds.training) == (3, 5, 3)


def test_dataset_sets_its_protocol():
    """`_self_` comes first in the defaults, so an option's values replace those in config.yaml."""
    digits, cifar = build(composed()), build(composed("dataset=cifar10"))
    assert (digits.settings.num_clients, digits.settings.rounds, digits.local.batch_size) == (
        20,
        30,
        20,
    )
    assert (cifar.settings.num_clients, cifar.settings.rounds, cifar.local.batch_size) == (
        100,
        200,
        50,
    )


# --- messages


# what is set => how the message begins, ... is the last of what is set
BAD = """
local.batch_size=0 => local.batch_size=0: must be at least 1
local.batch_size=1.5 => local.batch_size=1.5: must be an integer
local.lr=fast => local.lr=fast: must be a number
local.lr=0 => local.lr=0.0: must be finite and greater than 0
local.momentum=1 => local.momentum=1.0: must be at least 0 and less than 1
participation=0 => participation=0.0: must be greater than 0 and at most 1
rounds=0 => rounds=0: must be at least 1
augment=maybe => augment=maybe: must be true or false
targets=[50] => targets=[50.0]: must be a list of numbers greater than 0 and at most 1
targets=0.5 => targets=0.5: must be a list of values, each a number
hardware.threads=0 => hardware.threads=0: must be at least 1 and at most 1024, or null
hardware.precision=fp61 => hardware.precision=fp61: must be one of auto, fp32, tf32, bf16, fp64
weighting=example => weighting=example: must be one of examples, uniform (nearest: 'examples')
alpha=0 => alpha=0
algorithm=fedntd algorithm.beta=-1 => algorithm.beta=-1.0: must be finite and at least 0
algorithm=fedntd algorithm.distance=kI => ...: must be one of kl, mse (nearest: 'kl')
+algorithm.muu=1 => algorithm.muu: no such key; known: paradigm
algorithm=fedprox +algorithm.muu=1 => algorithm.muu: no such key (nearest: 'mu'); known: paradigm
algorithm=fedprox ~algorithm.mu => algorithm.mu: is missing
algorithm._target_=fedexp.engine.hardware.FedAvg => ...: cannot be imported
algorithm._target_=fedexp.core.tree.map => ...: must be a dataclass
algorithm._target_=os.system => algorithm._target_=os.system: is not a fedexp class
+dataset.augmentation.flop=true => dataset.augmentation.flop: no such key (nearest: 'flip')
dataset.augmentation.cutout=-1 => dataset.augmentation.cutout=-1: must be at least 0
dataset.std=[0] => dataset.std=[0.0]: must be greater than 0
dataset.mean=[nan] => dataset.mean=[nan]: must be finite
dataset.split_seed=4294967296 => dataset.split_seed=4294967296: must be from 0 to 4294967295
dataset.augmentation.crop_padding=9223372036854775807 => dataset.augmentation.crop_padding=92233
dataset=image_folder dataset.size=2147483648 => ...: must be greater than 0 and at
dataset=thucnews dataset.length=2147483648 => dataset.length=2147483648: must be from 1 to 65536
hardware.threads=2147483648 => ...: must be at least 1 and at most 1024, or null
local.batch_size=1000000000000000000000 => ...: must be an integer of at most 64 bits
local.epochs=1000001 => local.epochs=1000001.0: must be greater than 0 and at most 1000000, or null
model.hidden=[1,9223372036854775808] => model.hidden=[1, 9223372036854775808]: must be a list of
surrogate.options=5 => surrogate.options=5: must be a mapping, such as {root: photos}
local.rates=[0.1] => local.rates=[0.1]: must be a mapping from an integer to a number, or null
local.schedule=rates => local.rates=None: must be set with local.schedule=rates
local.rates={1:0.1} => local.rates={1: 0.1}: must be a map from rounds (2, 3,
+surrogate.options.root=a => surrogate.options={'root': 'a'}: must be {} if surrogate.dataset=null
schedule.clients=[3] => schedule.clients=[3]: must be null without schedule.classes
validation.per_client=2 => validation.per_client=2: must be true or false
surrogate.dataset=3 => surrogate.dataset=3: must be the name of a data set, or null
scenario=domain_incremental scenario.domains=[3] => scenario.domains[0]=3: must be the name
seeds.sampling=-1 => seeds.sampling=-1: must be at least 0
seeds.partition=${nope} => seeds.partition: Interpolation key 'nope' not found
seed=??? => seed
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_invalid_value_is_one_line(line):
    overrides, message = line.split(" => ")
    (said,) = errors_of(*overrides.split())
    assert said.startswith(message.replace("...", overrides.split()[-1]))


def test_all_errors_are_shown_at_once():
    local = ["local.lr=0", "local.batch_size=0", "local.momentum=2"]
    others = [
        "rounds=zero",
        "algorithm=fedntd",
        "algorithm.tau=0",
        "algorithm.beta=-1",
        "hardware.device=tpu",
    ]
    keys = [re.split("[=:]", line)[0] for line in errors_of(*local, *others)]
    wrong = [*local, *(key for key in others if key != "algorithm=fedntd")]
    assert sorted(keys) == sorted(key.split("=")[0] for key in wrong)


def test_error_of_a_referenced_value_appears_once():
    """`seeds.*` refer to `seed`, and the rounds of a task to `rounds`."""
    assert errors_of("seed=x") == ["seed=x: must be an integer"]
    assert errors_of("seed=-1") == ["seed=-1: must be at least 0"]
    assert errors_of("rounds=x") == ["rounds=x: must be an integer"]
    assert sorted(errors_of("seeds.sampling=x", "seed=y")) == [
        "seed=y: must be an integer",
        "seeds.sampling=x: must be an integer",
    ]


# --- conversion


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (float, 1, 1.0),
        (float, "0.1", 0.1),
        (float, "1e-3", 1e-3),
        (int, "7", 7),
        (int | None, None, None),
        (int | None, 3, 3),
        (str | None, None, None),
        (str, 8, "8"),
        (str, True, "True"),
        (bool, "false", False),
        (list[float], [], []),
        (list[float], [1, 0.5], [1.0, 0.5]),
        (tuple[float, ...], [1, 2], (1.0, 2.0)),
        (tuple[int, ...], [32, 64], (32, 64)),
        (Any, {"a": [1]}, {"a": [1]}),
    ],
)
def test_values_are_converted(annotation, value, expected):
    result = convert(annotation, value, "key")
    assert (result, type(result)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (int, 1.5, "key=1.5: must be an integer"),
        (int, True, "key=True: must be an integer"),
        (int, None, "key=None: must be an integer"),
        (float, "a", "key=a: must be a number"),
        (float, [1.0], "key=[1.0]: must be a number"),
        (float, True, "key=True: must be a number"),
        (bool, 2.5, "key=2.5: must be true or false"),
        (bool, 2, "key=2: must be true or false"),
        (str, None, "key=None: must be a string"),
        (str, ["a"], "key=['a']: must be a string"),
        (int | None, "a", "key=a: must be an integer, or null"),
        (
            list[float],
            1.0,
            "key=1.0: must be a list of values, each a number, such as [1.0]",
        ),
        (list[float], ["a"], "key=['a']: must be a list of values, each a number"),
        (tuple[int, ...], [1.5], "key=[1.5]: must be a list of values, each an integer"),
    ],
)
def test_wrong_types_are_rejected(annotation, value, message):
    with pytest.raises(ConfigError) as error:
        convert(annotation, value, "key")
    assert str(error.value) == message


THEIRS = (
    "from dataclasses import dataclass\n"
    "from fedexp.algorithms.base import FedAvg\n"
    "@dataclass(frozen=True, kw_only=True)\n"
    "class Theirs(FedAvg):\n"
    "    rho: float\n"
)


def test_user_class_must_be_named_in_the_users_yaml(tmp_path, monkeypatch):
    (tmp_path / "their_package.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    target = "algorithm._target_=their_package.Theirs"
    assert errors_of(target, "+algorithm.rho=2")[0].startswith(f"{target}: is not a fedexp class")
    assert "their_package" not in sys.modules
    option = tmp_path / "conf_mine" / "algorithm" / "theirs.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: their_package.Theirs\nparadigm: federated\n")
    monkeypatch.setattr("fedexp.config.values.search_path", lambda: [CONF, tmp_path / "conf_mine"])
    config = composed(target, "+algorithm.rho=2")
    algorithm = build(config).algorithm
    assert (type(algorithm).__name__, algorithm.rho) == ("Theirs", 2.0)
    assert errors_of(target) == ["algorithm.rho: is missing"]
    assert errors_of(target, "+algorithm.rho=x") == ["algorithm.rho=x: must be a number"]


@pytest.mark.parametrize("group", GROUPS)
def test_class_of_another_group_is_rejected(group):
    other = "fedexp.data.partition.IID" if group != "partition" else "fedexp.models.cnn.CNN"
    config = composed()
    OmegaConf.set_struct(config, False)
    node, key, base = {"_target_": other}, group, GROUPS[group]
    if group in MULTIPLE:
        node, key, (base,) = {"mine": node}, f"{group}.mine", get_args(base)
    config[group] = node
    name = f"{base.__module__}.{base.__qualname__}"
    wanted = f"{key}._target_={other}: must be {name} or a class that derives from it"
    with pytest.raises(ConfigError) as error:
        build(config)
    assert wanted in str(error.value).splitlines()


def test_nested_class_of_another_kind_is_rejected():
    other = "fedexp.data.partition.IID"
    (line,) = errors_of(f"dataset.augmentation={{_target_: {other}}}")
    allowed = "fedexp.data.augment.Transform or a class that derives from it"
    assert line == f"dataset.augmentation._target_={other}: must be {allowed}"
    assert errors_of("dataset.augmentation=null") == [
        "dataset.augmentation=None: must be a node with _target_"
    ]
    assert errors_of("surrogate.dataset=[digits]")[0].startswith(
        "surrogate.dataset=['digits']: must be the name of a"
    )


def test_abstract_class_is_rejected():
    assert errors_of("partition._target_=fedexp.models.Model")[0].startswith(
        "partition._target_=fedexp.models.Model"
    )
    abstract = "fedexp.data.datasets.Dataset"
    assert errors_of(f"dataset._target_={abstract}") == [
        f"dataset._target_={abstract}: does not define read"
    ]


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python tests/test_build.py --write"
    SURFACE.write_text("\n".join(sorted(known_keys())) + "\n", encoding="utf-8")
    hashes = [f"{name} {hash_of(name)}\n" for name in list_options("experiment", CONFS)]
    EXPERIMENTS.write_text("".join(hashes), encoding="utf-8")
    frozen = {each: identity_of(each) for each in SELECTED} | FROZEN
    lines = [f"{each} {identity}\n" for each, identity in sorted(frozen.items())]
    IDENTITIES.write_text("".join(lines), encoding="utf-8")


@pytest.mark.parametrize("node", [None, "fedavg", 3, {"momentum": 0.9}])
def test_value_that_is_no_option_of_a_group_is_named(node):
    with pytest.raises(ConfigError, match=r"^algorithm: must be one of the group's options"):
        make_target(node, "algorithm", FedAvg)
