"""Random command lines, configuration files and partition files (see test_fuzz.py).

The options and keys are read from conf/, so new ones are drawn without being named here.
"""

import io
import json
import re
import string
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from fedexp.algorithms.interfaces import Needs
from fedexp.config.build import build
from fedexp.config.options import GLOBAL_OPTION, list_groups, list_options
from fedexp.config.trust import find_class
from fedexp.core.errors import ConfigError
from toy_federation import CONF, composed

GROUPS = list_groups([CONF])
# the groups and the presets
FOLDERS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
IMAGES, TEXTS = "images", "texts"  # folders with small data sets, which test_fuzz.py writes

QUICK = (
    *("rounds=1", "num_clients=4", "local.epochs=1", "figures=false"),
    *("hardware.threads=1", "hardware.engine=sequential"),
)
NARROW = ("model.channels=[4,8]", "model.hidden=[16]")
# Larger values of these keys only take longer, so small ones are drawn.
WORK = re.compile(
    r"(rounds|rounds_per_task|epochs|head_epochs|epochs_on_server|epochs_factor|steps|ascent|"
    r"max_passes|max_draws|blocks|samples|patience)$"
)
# Values as typed, one per line. Each is wrong for some key.
TYPED = r"""
null
true
false
-1
0
1
2
3
7
0.5
1.5
-0.5
1e-3
1e-300
1e308
1e400
nan
inf
-inf
100000
2147483648
9223372036854775807
18446744073709551616
1000000000000000000000000000000
-9223372036854775809
abc
''
'é☃'
' '
'a b'
'a\'b'
a=b
[]
[1]
[0]
[-1]
[0.5]
[1,2]
[1,1]
[a]
[0.5,a]
[[1]]
[[0,1],[2]]
[null]
{}
{a:1}
{_target_:os.system}
???
${rounds}
${nothing}
${seed
${oc.env:NO_SUCH}
${now:%Y}
${oc.env:HOME}
${eval:1}
${hydra:runtime.cwd}
${fedexp.run_name:}
$
'../x'
./y
range(3)
choice(1,2)
1,2
glob(*)
sort(2,1)
int(3.5)
str(3)
[
]
{
}
'
"
:
fedexp.algorithms.base.FedAvg
os.system
cpu
cuda:99
kl
mean
test.txt
1e
0x10
1_000
"""
ODD = ["", "'a\nb'", *TYPED.split("\n")[1:-1]]
CHARACTERS = string.ascii_lowercase + string.digits + "=[]{}()'\",:;$\\~+@./#%*&!|<>-_ \té☃"
YAML = [
    *(
        "",
        "\n",
        "#",
        "a",
        "[1, 2",
        "{",
        "a: b: c",
        "a:\n\t- b",
        "- 1\n- 2\n",
        "null",
        "&a [*a]",
        "? [1]\n: 2\n",
        "%YAML 9",
    ),
    *(
        "!!python/object/apply:os.system ['echo fuzz > stolen']",
        "!!python/name:os.system",
        "a: *b",
        "---\n---\na: 1\n",
    ),
    *(
        "_target_: 3",
        "_target_: os.system",
        "_target_: [a]",
        "_target_:\n  a: 1\n",
        "_target_: ${a}",
        "defaults: 3",
    ),
    *(
        "defaults: [nowhere]",
        "defaults: [{a: b}]",
        "defaults: [_self_, {/algorithm: mine}]",
        "defaults:\n  - a: [1\n",
    ),
    *(
        "# @package\na: 1",
        "# @package _global_\nrounds: [1",
        "# @package _global_\nalgorithm: 3\n",
        "1: 2",
        "? a\n",
        "~: 1",
    ),
    *(
        "# @package _global_\nhydra: 3\n",
        "# @package nowhere.at.all\na: 1\n",
        "a: ${a}",
        "a: ${b}\nb: ${a}\n",
        "2: {3: 4}",
    ),
    *(
        "a: !!binary x",
        "a: 1\na: 2\n",
        "\ufeff_target_: 1",
        "[" * 2000,
        "a: " * 300,
        "- " * 1000,
        "title: x\nblocks: 3",
    ),
    "a: &a [x, x]\nb: [*a, *a]\n",
]


@dataclass(frozen=True)
class Case:
    """A command line and the files in its working directory (path -> content)."""

    arguments: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)


# ---- what can be set ----


@cache
def defaults_of(group: str, option: str) -> dict[str, Any]:
    """Return key -> default for the keys of a group's option."""
    path = CONF / group / f"{option}.yaml"
    node = OmegaConf.load(path)
    prefix = "" if GLOBAL_OPTION.search(path.read_text(encoding="utf-8")) else f"{group}."
    found: dict[str, Any] = {}
    for parent in node.get("defaults", ()):
        if isinstance(parent, str) and parent != "_self_":
            found |= defaults_of(group, parent)
    return found | walk(node, prefix)


@cache
def top_level() -> dict[str, Any]:
    """Return key -> default for the keys of conf/config.yaml."""
    return {
        k: v
        for k, v in walk(OmegaConf.load(CONF / "config.yaml"), "").items()
        if not k.startswith("hydra")
    }


def walk(node: Any, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in map(str, node):
        child = node._get_node(name)
        if name == "defaults":
            continue
        if isinstance(child, DictConfig) and len(child):
            found |= walk(child, f"{prefix}{name}.")
        plain = OmegaConf.create({"value": child})
        found[f"{prefix}{name}"] = OmegaConf.to_container(plain, resolve=False)["value"]
    return found


@cache
def needs_of(algorithm: str) -> Needs:
    return build(composed(f"algorithm={algorithm}")).algorithm.needs


@cache
def printed(key: str) -> tuple[str, ...]:
    """Return the values of a key in conf/. Most of them are valid."""
    owners = [
        top_level(),
        *(defaults_of(group, option) for group in GROUPS for option in list_options(group, [CONF])),
    ]
    found = [owner[key] for owner in owners if key in owner]
    return tuple(
        dict.fromkeys(
            spell(value) for value in found if value is not None and "???" not in spell(value)
        )
    )


@cache
def choices(group: str, option: str, key: str) -> tuple[str, ...]:
    """Return the allowed values from the message for an invalid one."""
    try:
        build(composed(f"{group}={option}", f"{key}=__"))
    except ConfigError as error:
        if found := re.search(r"must be one of ([^()\n]+)", str(error)):
            return tuple(
                word.strip()
                for word in found.group(1).split(",")
                if re.fullmatch(r"[\w.]+", word.strip())
            )
    except Exception:
        pass
    return ()


# ---- command lines ----


def likely(draw: Any, probability: float) -> bool:
    """Return true with a probability; hypothesis shrinks to true."""
    return draw(st.integers(0, 99)) < 100 * probability


def spell(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


@st.composite
def values(draw: Any, key: str, default: Any, known: tuple[str, ...]) -> str:
    """Draw a value for a key, often a valid one.

    known: the values that the key allows, if there are only a few.
    """
    if WORK.search(key):
        return draw(st.sampled_from(["1", "2", "0", "-1", "null", "a", "[1]", "${nothing}", "???"]))
    if key.endswith("data_dir") or key == "dataset.root":
        return draw(st.sampled_from(["nowhere", IMAGES, TEXTS, "3", "null", "[a]", "''", "../x"]))
    kinds = [st.sampled_from(ODD), st.text(CHARACTERS, max_size=12)]
    if valid := printed(key) + known:
        kinds += [st.sampled_from(valid)] * 2
    if isinstance(default, bool):
        kinds.append(st.sampled_from(["true", "false"]))
    elif isinstance(default, int):
        kinds += [st.integers(-2, 12).map(str), st.just(str(default + 1))]
    elif isinstance(default, float):
        limits = (0, 1) if default <= 1 else (-10, 1000)
        kinds += [st.floats(*limits).map(str), st.just(str(default / 2))]
    elif isinstance(default, list) and default:
        item = st.sampled_from([*map(spell, default), *ODD])
        kinds.append(st.lists(item, max_size=4).map(lambda items: f"[{','.join(items)}]"))
    return draw(st.one_of(kinds))


@st.composite
def typo(draw: Any, word: str) -> str:
    at = draw(st.integers(0, max(len(word) - 1, 0)))
    new = draw(st.sampled_from(["", "a", "_", ".", word[at : at + 1] * 2, "-", " ", "/"]))
    return word[:at] + new + word[at + 1 :]


@st.composite
def setting(draw: Any, chosen: dict[str, str]) -> str:
    """Draw an override, mostly of a key that the chosen options have."""
    if likely(draw, 0.03):  # a key of another option
        group = draw(st.sampled_from(GROUPS))
        chosen = {group: draw(st.sampled_from(list_options(group, [CONF])))}
    owners = [(group, option, defaults_of(group, option)) for group, option in chosen.items()]
    owners = [("", "", top_level()), *(owner for owner in owners if owner[2])]
    group, option, keys = draw(st.sampled_from(owners))
    names = [name for name in sorted(keys) if not name.endswith("_target_")] or sorted(keys)
    key = draw(st.sampled_from(names))
    is_choice = group and isinstance(keys[key], str) and not key.endswith(("data_dir", "path"))
    value = draw(values(key, keys[key], choices(group, option, key) if is_choice else ()))
    if likely(draw, 0.92):
        return f"{key}={value}"
    key = draw(st.one_of(st.just(key), typo(key)))
    form = draw(st.sampled_from(FORMS.split()))
    return form.format(key=key, value=value)


GIVEN_FLAGS = """
--cfg job
--cfg all
--cfg nothing
--cfg
--resolve
--info
--info x
--package algorithm
--config-dir nowhere
--config-dir
--config-name nowhere
--config-path nowhere
--help
--nonsense
-x
--multirun
--run
--version
--hydra-help
--cfg job --resolve
--cfg job --package nowhere
-c job -p local
--
--experimental-rerun nowhere
--shell-completion install=bash
-
--help --cfg job
"""
FLAGS = [line.split() for line in GIVEN_FLAGS.strip().splitlines()]
OF_HYDRA = """
hydra.run.dir=run
hydra.run.dir=
hydra.run.dir=null
hydra.run.dir=[1]
hydra.run.dir=${nothing}
hydra.run.dir=there.txt
hydra.run.dir=there.txt/run
hydra.run.dir='a b'
hydra.run.dir=.
hydra.run.dir=a/b/c
hydra.job.chdir=true
hydra.verbose=true
hydra.verbose=nonsense
hydra.output_subdir=sub
hydra.job.name=x
hydra/launcher=nothing
hydra.launcher.nothing=1
hydra.mode=MULTIRUN
hydra.mode=x
hydra/sweeper=nothing
hydra.nothing=1
hydra=3
hydra/job_logging=default
hydra.job.env_set.A=1
hydra.searchpath=[nowhere]
hydra.sweep.dir=out
hydra.sweep.subdir=${nothing}
hydra.callbacks=null
hydra.callbacks.x={_target_:os.getcwd}
hydra.help.template=x
hydra.job.config.override_dirname.kv_sep=3
hydra.searchpath=[pkg://nowhere]
"""
HYDRA = OF_HYDRA.strip().splitlines()
FORMS = """
{key}={value}
+{key}={value}
++{key}={value}
~{key}
{key}
{key}=
={value}
{key}=={value}
{key}@here={value}
~{key}={value}
{key}:{value}
+{key}
{key}.more={value}
{key}/more={value}
{key}[0]={value}
"""


def smaller(model: str) -> list[str]:
    """Return overrides that divide every width of a model by 8."""
    if model == "timm":
        return ["model.name=test_vit"]  # 0.3 million parameters
    small = []
    for key, default in defaults_of("model", model).items():
        if isinstance(default, int) and default >= 32:
            small.append(f"{key}={default // 8}")
        elif isinstance(default, list):
            widths = (str(max(width // 8, 1) if width > 4 else width) for width in default)
            small.append(f"{key}=[{','.join(widths)}]")
    return small


DATA = {
    "digits": ({}, []),
    IMAGES: (
        {"dataset": "image_folder"},
        [f"dataset.root={IMAGES}", "partition.min_size=1"],
    ),
    TEXTS: (
        {"dataset": "thucnews", "model": "textcnn"},
        [
            *(f"data_dir={TEXTS}", "partition.min_size=1"),
            *("dataset.vocabulary=null", "dataset.vectors=null"),
        ],
    ),
}


# They need a vision transformer, adapters or a frozen backbone.
PRETRAINED = ("afcl", "codaprompt", "dualprompt", "l2p", "lorm", "pilora")


@st.composite
def groups(draw: Any) -> tuple[dict[str, str], list[str]]:
    """Draw options of some groups, and overrides that most of them need."""
    kind = draw(st.sampled_from(["digits"] * 3 + [IMAGES, TEXTS]))
    chosen, more = dict(DATA[kind][0]), [*QUICK, "participation=0.5", "hardware.device=cpu"]
    more += DATA[kind][1]
    drawn = draw(st.lists(st.sampled_from(GROUPS), max_size=2, unique=True))
    for group in {*drawn, "algorithm"} - {"model" if kind == TEXTS else "dataset"}:
        options = list_options(group, [CONF])
        if group == "algorithm" and likely(draw, 0.95):
            options = [option for option in options if option not in PRETRAINED]
        chosen[group] = draw(st.sampled_from(options))
    target = str(defaults_of("algorithm", chosen["algorithm"])["algorithm._target_"])
    scenarios = find_class(target, "").scenarios
    if chosen.get("scenario", "none") not in scenarios and likely(draw, 0.9):
        chosen["scenario"] = scenarios[0]
    if chosen.get("partition", "lda") != "lda":
        more = [each for each in more if "min_size" not in each]
    if kind != "digits" and chosen.get("scenario") == "class_incremental":
        more.append("scenario.num_tasks=2")  # the small data sets have two or three classes
    if chosen.setdefault("tracker", "none") == "wandb":
        more.append("tracker.mode=disabled")
    needs = needs_of(chosen["algorithm"])
    if likely(draw, 0.95 if needs.public else 0.2):
        more.append("public.fraction=0.1")
    if likely(draw, 0.85 if needs.surrogate else 0.2):
        more.append("surrogate.fraction=0.2")
    elif likely(draw, 0.2):
        data = draw(st.sampled_from(["digits", "image_folder", "weibo", "x"]))
        more.append(f"surrogate.dataset={data}")
    return chosen, more + smaller(chosen.get("model", "cnn"))


@st.composite
def command_lines(draw: Any) -> Case:
    chosen, more = draw(groups())
    if likely(draw, 0.03):
        group = draw(st.sampled_from(sorted(chosen)))
        chosen = chosen | {group: draw(st.one_of(typo(chosen[group]), st.sampled_from(ODD)))}
        return Case((*(f"{group}={option}" for group, option in chosen.items()), *more))
    arguments = [f"{group}={option}" for group, option in chosen.items()] + more
    arguments += [draw(setting(chosen)) for _ in range(draw(st.sampled_from([0, 1, 0, 2, 0])))]
    if likely(draw, 0.06):
        arguments.append(draw(st.text(CHARACTERS, min_size=1, max_size=10)))
    if likely(draw, 0.06):
        arguments.append(draw(st.sampled_from(HYDRA)))
    if likely(draw, 0.06):
        flags = draw(st.sampled_from(FLAGS))
        arguments = flags + arguments if likely(draw, 0.5) else arguments + flags
    return Case(tuple(arguments), {"there.txt": b"in the way"})


# ---- files ----


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """Draw the content with bytes removed, repeated, replaced or cut off."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        stop = min(start + draw(st.integers(0, 40)), len(content))
        new = draw(
            st.one_of(st.just(b""), st.binary(max_size=6), st.sampled_from(YAML).map(str.encode))
        )
        tail = b"" if likely(draw, 0.2) else content[stop:]
        content = content[:start] + new + content[start:stop] * draw(st.integers(0, 2)) + tail
    return content


@st.composite
def yaml_files(draw: Any) -> Case:
    """Draw a user's option in --config-dir."""
    group = draw(st.sampled_from(FOLDERS))
    paths = sorted((CONF / group).rglob("*.yaml"))
    good = draw(st.sampled_from(paths)).read_bytes()
    bad = st.one_of(st.sampled_from(YAML).map(str.encode), damaged(good), st.binary(max_size=20))
    text = (
        draw(bad)
        if likely(draw, 0.75)
        else good + draw(st.sampled_from([b"", b"# mine\n", "# ☃\n".encode()]))
    )
    arguments = [*QUICK, "tracker=none", *NARROW]
    if group == "sweep":
        arguments = ["--multirun", "sweep=mine", "preview=true"]
    elif group == "tuned":
        arguments.append("tuned=mine")
    else:
        arguments = [a for a in arguments if not a.startswith(f"{group}.")] + [f"{group}=mine"]
    return Case(("--config-dir", "conf_mine", *arguments), {f"conf_mine/{group}/mine.yaml": text})


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


ARRAYS = st.one_of(
    st.lists(st.integers(-1, 1500), max_size=6).map(np.array),
    st.lists(st.floats(), max_size=3).map(np.array),
    st.sampled_from(
        [
            np.array(3),
            np.zeros((2, 2), np.int64),
            np.zeros(0),
            np.array(["a"]),
            np.array([b"x"]),
            np.array([None, 1]),
            np.array([True]),
            np.array([2**64 - 1], np.uint64),
            np.array([1 + 2j]),
            np.array(["2020-01-01"], "M8"),
            np.array([(1, 2)], [("a", int), ("b", int)]),
        ]
    ),
)
ARRAY_FILES = st.dictionaries(
    st.sampled_from(["0", "1", "2", "indices", "sizes", "hash", "x"]), ARRAYS, max_size=4
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 1500)
    | st.floats()
    | st.text(max_size=3)
    | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("0123a"), inner, max_size=3)
    ),
    max_leaves=8,
)


GOOD = {str(client): list(range(client, 1400, 4)) for client in range(4)}
GOOD_NPZ = npz(**{client: np.array(numbers) for client, numbers in GOOD.items()})


@st.composite
def partition_files(draw: Any) -> Case:
    kind = draw(st.sampled_from(["npz", "json"]))
    good = GOOD_NPZ if kind == "npz" else json.dumps(GOOD).encode()
    if kind == "npz":
        other = ARRAY_FILES.map(lambda arrays: npz(**arrays))
    else:
        texts = st.one_of(JSON, JSON.map(lambda value: GOOD | {"1": value})).map(json.dumps)
        other = st.one_of(texts.map(str.encode), st.just(b"[" * 100_000))
    content = draw(st.one_of(st.just(good), other, damaged(good), st.binary(max_size=20)))
    arguments = [*QUICK, "partition=file", f"partition.path=parts.{kind}"]
    arguments += [f"num_clients={draw(st.sampled_from([4, 2]))}", "participation=0.5"]
    arguments += ["tracker=none", *NARROW]
    return Case(tuple(arguments), {f"parts.{kind}": content})


def run_files(run: dict[str, bytes]) -> st.SearchStrategy[Case]:
    """A run that is resumed after one of the files that describe it was damaged.

    run: path -> content.
    """

    @st.composite
    def build_case(draw: Any) -> Case:
        texts = [name for name in sorted(run) if name.endswith((".yaml", ".npz", ".json"))]
        name = draw(st.sampled_from(texts))
        odd = st.sampled_from(YAML).map(str.encode)
        content = draw(st.one_of(damaged(run[name]), odd, st.binary(max_size=20)))
        files = {f"run/{path}": old for path, old in run.items()} | {f"run/{name}": content}
        more = draw(st.sampled_from([(), ("seed=1",), ("algorithm=fedprox",)]))
        return Case(("resume=run", *more), files)

    return build_case()


def cases(run: dict[str, bytes]) -> st.SearchStrategy[Case]:
    """Draw a case of any kind, mostly command lines."""
    kinds = [command_lines()] * 6 + [yaml_files()] * 2 + [partition_files(), run_files(run)]
    return st.sampled_from(range(len(kinds))).flatmap(lambda i: kinds[i])


def source_files(root: Path) -> dict[str, bytes]:
    """Return relative path -> content of every file below a directory."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
