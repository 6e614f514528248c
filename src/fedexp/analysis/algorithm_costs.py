"""Make the table of `fedexp requirements`: what each algorithm needs in addition to FedAvg.

docs/algorithms/index.md also contains this table. The table extends FedNTD's Table 6 (statefulness,
communication, extra data) to all algorithms, and adds computation. The entries are the requirements
that the algorithms declare (`needs`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Needs
from fedexp.config.values import make_target
from fedexp.core.console import plural

HEAD = (
    "algorithm",
    "a client keeps",
    "the server keeps",
    "extra upload / download",
    "extra data",
    "extra computation",
)
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "fednova": ({"variant": "ccvr"}, {"variant": "ccvr_frozen"}),
    "feddf": ({"epochs_on_server": 0},),
    "fedlmd": ({"teacher": False},),
    "flashback": ({"on_server": False},),
    "cfed": ({"server_distillation": True},),
}


def rows(folder: Path) -> Iterator[tuple[str, Needs]]:
    """Yield (name of the algorithm and its variant, needs) for each file in conf/algorithm.

    Centralised algorithms are omitted, since they exchange nothing.
    """
    for path in sorted(folder.glob("*.yaml")):
        node = read_option(path)
        if node.get("paradigm") == "centralized":
            continue
        first: dict[str, Any] = {}
        for changes in (first, *VARIANTS.get(path.stem, ())):
            name = " ".join(
                [f"`{path.stem}`", *(f"`{k}={str(v).lower()}`" for k, v in changes.items())]
            )
            yield name, make_target(node | changes, "algorithm", FedAvg).needs


def read_option(path: Path) -> dict[str, Any]:
    """Return the content of an option's file, merged with the options in its defaults list.

    Values that depend on the local optimizer are those for SGD.
    """
    root = OmegaConf.create({"local": {"optimizer": "sgd"}, "option": OmegaConf.load(path)})
    node: Any = OmegaConf.to_container(root.option, resolve=True)
    before: dict[str, Any] = {}
    for name in node.pop("defaults", ()):
        before |= {} if name == "_self_" else read_option(path.with_name(f"{name}.yaml"))
    return before | node


def format_size(number: float) -> str:
    """Format a size as a multiple of the model's size |w|."""
    if number == 0:
        return "-"
    return "|w|" if number == 1 else f"{number:g} |w|"


def describe_computation(needs: Needs) -> str:
    """Describe the computation that is needed in addition to one gradient per step."""
    gradients = needs.gradients if needs.gradients != 1 else 0
    of_cohort, others = needs.server_teachers
    teachers = count_noun(others, "teacher")
    if of_cohort:
        teachers = f"|S| + {others} teachers" if others else "|S| teachers"
    parts = [
        (count_noun(gradients, "gradient"), count_noun(needs.teachers, "teacher"), "per step"),
        (
            count_noun(needs.gradient_passes, "gradient pass"),
            count_noun(needs.forward_passes, "forward pass"),
            "per round",
        ),
        (needs.work, "", ""),
        (
            teachers,
            count_noun(needs.server_passes, "gradient pass") or needs.server_work,
            "on the server",
        ),
    ]
    texts = [(" and ".join(filter(None, what)), where) for *what, where in parts]
    return "; ".join(f"{what} {where}".strip() for what, where in texts if what)


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun, such as `2 passes`, or "" for zero."""
    return plural(number, noun) if number else ""


def table_row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") or "-" for cell in cells) + " |"


def requirements_table(folder: Path) -> str:
    lines = [table_row(HEAD), "|" + " --- |" * len(HEAD)]
    for name, needs in rows(folder):
        sizes = f"{format_size(needs.up)} / {format_size(needs.down)}"
        traffic = sizes if needs.up or needs.down else ""
        unsent = needs.unsent and f"without {needs.unsent}"
        traffic = "; ".join(part for part in (traffic, needs.small, unsent) if part)
        kept = needs.client_state, needs.server_state
        lines.append(table_row((name, *kept, traffic, needs.data, describe_computation(needs))))
    return "\n".join(lines)
