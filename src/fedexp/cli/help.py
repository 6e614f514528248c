"""Texts that `fedexp --help` and `fedexp --version` print.

The help is generated from conf/, so it is always current. This module imports no slow module.
"""

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import fill, indent, wrap

import fedexp
from fedexp.cli.commands import SUBCOMMANDS
from fedexp.config.options import list_groups, list_options

PACKAGES = ("fedexp", "torch", "torchvision", "numpy", "hydra-core", "omegaconf", "wandb")
WIDTH = 100

HEADER = """\
fedexp: federated-learning experiments that measure forgetting.

  fedexp [group=option ...] [key=value ...]   one run
  fedexp --multirun group=a,b key=1,2,3       a sweep over all combinations, in multirun/
  fedexp resume=<run directory>               resume an interrupted run
"""

KNOBS = """\
Common options (defaults in conf/config.yaml and of the data set; see `fedexp --cfg job`)
  alpha=0.1 min_size=10         partition=dirichlet      shards_per_client=2   partition=sharding
  rounds=200                    communication rounds     num_clients=100       clients in total
  participation=0.1             share of the clients     weighting=examples    or uniform
  local.epochs=5                local epochs per round   local.batch_size=50   examples per step
  local.lr=0.01                 learning rate            local.lr_decay=0.99   factor per round
  local.optimizer=sgd           or adam, adamw, ...      local.schedule=cosine or exponential, step
  local.momentum=0.9            momentum of SGD          local.weight_decay=1e-5
  server.optimizer=yogi         or sgd, adam, adagrad    server.lr=0.01        server learning rate
  augment=false                 no crop, flip, cutout    eval_interval=1       test every n rounds
  public.fraction=0.025         server's share of data   public.balanced=false drawn at random
  surrogate.dataset=caltech256  unlabelled examples      surrogate.fraction=0.2 or of training data
  scenario.rounds_per_task=20   in continual learning (scenario=class_incremental)
  targets=[0.5,0.6]             for rounds to target     checkpoint_interval=1 save every n rounds
  seed=0                        or separate seeds: seeds.partition seeds.sampling seeds.training
  algorithm.beta=1 algorithm.tau=1 algorithm.mu=0.1      parameters by the papers' symbols
  hardware.precision=fp32       fp32, tf32, bf16, fp64   hardware.engine=auto  or workers ...
  hardware.workers=2            number of processes      hardware.threads=1    threads per process
  figures=false                 draw no figures
  test_views=[plain,augmented]  test twice               evaluate_on=both      or validation, test
  validation.fraction=0.1       held out of training     stop.patience=10      evaluations to wait
  stop.minutes=30               save, stop after 30 min  data_dir=data         or FEDEXP_DATA
  hydra.run.dir=<directory>     the run directory (default: outputs/<date>/<time>_...)
"""

EXAMPLES = """\
Examples
  fedexp                                                   digits, 20 clients, under a minute
  fedexp algorithm=fedntd partition=dirichlet alpha=0.1    the same with not-true distillation
  fedexp experiment=fedntd/cifar10_s2 algorithm=fedntd     a setting of FedNTD's Table 1
  fedexp dataset=mnist forgetting_metric=all tracker=none  all forgetting metrics, no W&B
  fedexp --multirun algorithm=fedavg,fedntd seed=0,1,2     six runs, each in its own directory

More: --cfg job (the composed configuration), --config-dir DIR (your own groups), --hydra-help"""


def help_text(conf: Path, extra: list[Path]) -> str:
    """Return the text of `fedexp --help`. extra: the directories given by `--config-dir`."""
    return "\n".join([HEADER, subcommands_text(), groups_text(conf, extra), KNOBS, EXAMPLES])


def subcommands_text() -> str:
    """Return one line per subcommand with its purpose."""
    lines = ["Subcommands (each has a --help)"]
    for name, (function, arguments) in SUBCOMMANDS.items():
        what = str(function.__doc__).splitlines()[0].rstrip(".")
        lines.append(f"  {f'fedexp {name} {arguments}':<37}{what}")
    return "\n".join(lines) + "\n"


def groups_text(conf: Path, extra: list[Path]) -> str:
    """Return all groups with their options and descriptions, then the papers' settings and sweeps.

    A star marks the default option of a group.
    """
    chosen, folders = default_options(conf), [*extra, conf]
    lines = ["Groups (* = default)"]
    for group in list_groups(folders):
        lines += [f"  {group}", *option_lines(group, folders, chosen.get(group))]
    lines += ["", "Settings of the papers: experiment=<name>"]
    experiments = list_options("experiment", folders)
    for paper in dict.fromkeys(name.partition("/")[0] for name in experiments):
        lines.append(wrap_names(name for name in experiments if name.startswith(f"{paper}/")))
    lines.append(
        "Their tables and figures: fedexp --multirun sweep=<name>; preview=true lists jobs"
    )
    lines.append(wrap_names(list_options("sweep", folders)))
    lines.append("Where the jobs of a sweep run: hydra/launcher=<name>; basic: one after another")
    lines += option_lines("launcher", [conf])
    lines.append("How values are searched for: hydra/sweeper=<name>; basic: all combinations")
    lines += option_lines("sweeper", [conf])
    return "\n".join(lines) + "\n"


def option_lines(group: str, folders: list[Path], default: str | None = None) -> list[str]:
    """Return each option of a group with its description."""
    found = []
    for option in list_options(group, folders):
        paths = [folder / group / f"{option}.yaml" for folder in folders]
        text = description(next(path for path in paths if path.exists()))
        start = f"   {'*' if option == default else ' '}{option:<20} "
        found.append(fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)))
    return found


def wrap_names(found: Iterable[str]) -> str:
    """Join names with spaces and wrap them into indented lines."""
    lines = wrap(" ".join(found), WIDTH - 4, break_on_hyphens=False)
    return indent("\n".join(lines), " " * 4)


def default_options(conf: Path) -> dict[str, str]:
    """Map each group to its default option. For speed, no yaml parser is used."""
    chosen = {}
    for line in (conf / "config.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("  - ") and ":" in line and "override" not in line:
            group, option = line[4:].split(":", 1)
            chosen[group.strip()] = option.strip()
    return chosen


def description(path: Path) -> str:
    """Return the first comment line of an option's file, ignoring Hydra's `@package` line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
    return ""


def version_text() -> str:
    """Return the versions of fedexp, its main packages, Python and CUDA, one per line."""
    lines = [f"{name} {installed_version(name)}" for name in PACKAGES]
    return "\n".join(
        [
            *lines,
            f"Python {platform.python_version()} ({platform.platform()})",
            f"CUDA {cuda_version()}",
        ]
    )


def installed_version(name: str) -> str:
    """Return the version of a package.

    fedexp's version is read from its code, since it may run from source without installation.
    """
    if name == "fedexp":
        return fedexp.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def cuda_version() -> str:
    """Return torch's CUDA version and the name of the first CUDA device."""
    import torch

    if torch.version.cuda is None:
        return "none (torch was built without CUDA)"
    found = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no device"
    return f"{torch.version.cuda}, {found}"
