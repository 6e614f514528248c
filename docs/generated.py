"""The parts of the documentation that are made from docstrings, yaml files, committed tables and declarations."""

import ast
import csv
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fedexp.algorithms.base import FedAvg
from fedexp.build import find_class, make_target
from fedexp.compare import TABLES, printed_cells
from fedexp.explain import list_options
from fedexp.help import description, help_text
from fedexp.requirements import node_of
from fedexp.requirements import table as requirements_table
from fedexp.sweep import Sweep, load_sweep

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
INLINE = re.compile(r"(`[^`]*`)")
SPECIAL = re.compile(r"([\\*_\[\]<>])")


# --- texts


def prose(text: str) -> str:
    """Plain text as markdown: nothing but `code` keeps a meaning."""
    parts = INLINE.split(text)
    return "".join(part if part.startswith("`") else SPECIAL.sub(r"\\\1", part) for part in parts)


def from_docstring(text: str) -> str:
    """A docstring as markdown: indented lines are equations, a line that ends early ends a paragraph."""
    lines = inspect.cleandoc(text).splitlines()
    width = max(map(len, lines))
    blocks: list[str] = []
    equations: list[str] = []
    sentence = ""

    def close() -> None:
        nonlocal sentence
        if sentence:
            blocks.append(prose(sentence))
        if equations:
            blocks.append("```text\n" + textwrap.dedent("\n".join(equations)) + "\n```")
        sentence = ""
        equations.clear()

    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  "):
            if sentence:
                close()
            equations.append(line)
            continue
        if equations or not line:
            close()
        sentence = f"{sentence} {line}".strip()
        if following and len(line) + len(following.split()[0]) < width:  # the next word would have had room
            close()
    close()
    return "\n\n".join(blocks)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and Python-Markdown make it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


def comments(path: Path) -> list[str]:
    """The comment lines at the head of a yaml file after the first, joined to sentences."""
    head = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            head.append(line.lstrip("# "))
    return head[1:]


def cell(value: Any) -> str:
    """A yaml value in a table."""
    text = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()
    return f"`{text}`"


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    written = [[text.replace("|", "\\|") for text in line] for line in lines]
    top = list(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [top, ["---"] * len(top), *written])


# --- algorithms


def algorithms() -> list[str]:
    return list_options("algorithm", [CONF])


def algorithm_file(name: str) -> Path:
    return CONF / "algorithm" / f"{name}.yaml"


def title(name: str) -> str:
    """The method's name as papers write it."""
    return description(algorithm_file(name)).partition(":")[0]


def builds_on(name: str) -> str | None:
    """The option that a variant (a centralised twin) is made of."""
    node = yaml.safe_load(algorithm_file(name).read_text(encoding="utf-8"))
    return next((base for base in node.get("defaults", ()) if base != "_self_"), None)


@cache
def algorithm(name: str) -> FedAvg:
    """With the defaults of its yaml."""
    return make_target(node_of(algorithm_file(name)), "algorithm")


def field_comments(schema: type) -> dict[str, str]:
    """Field -> the comment behind it, of a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed([b for b in schema.__mro__ if dataclasses.is_dataclass(b)]):
        source = inspect.getsource(base)
        found |= dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", source, re.MULTILINE))
    return found


def allowed_values(schema: type) -> dict[str, str]:
    """Field -> what `__post_init__` requires of it, in the words of the error message."""
    found: dict[str, list[str]] = {}
    for base in reversed([b for b in schema.__mro__ if "__post_init__" in vars(b)]):
        for call in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(vars(base)["__post_init__"])))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            arguments = [a.value if isinstance(a, ast.Constant) else a for a in call.args]
            if call.func.id == "require" and all(isinstance(arguments[i], str) for i in (1, 3)):
                found.setdefault(str(arguments[1]).rpartition(".")[2], []).append(str(arguments[3]))
            elif call.func.id == "require_choice" and isinstance(arguments[2], ast.Tuple):
                choices = ", ".join(ast.literal_eval(arguments[2]))
                found.setdefault(str(arguments[0]).rpartition(".")[2], []).append(choices)
    return {key: "; ".join(texts) for key, texts in found.items()}


def yaml_comments(path: Path) -> dict[str, str]:
    """Key -> the comment behind its value, of an option and those that it builds on."""
    text = path.read_text(encoding="utf-8")
    bases = (yaml.safe_load(text) or {}).get("defaults", ())
    found: dict[str, str] = {}
    for base in bases:
        found |= {} if base == "_self_" else yaml_comments(path.with_name(f"{base}.yaml"))
    return found | dict(re.findall(r"^(\w+): [^#\n]*#\s*(.+)$", text, re.MULTILINE))


def options_table(name: str) -> str:
    """Every key of an algorithm with default, allowed values and meaning."""
    made, said = algorithm(name), yaml_comments(algorithm_file(name))
    fields, allowed = field_comments(type(made)), allowed_values(type(made))
    lines = []
    for field in dataclasses.fields(made):
        key = field.name
        meaning = [fields[key]] if key in fields else []
        meaning += [said[key]] if key in said and said[key] != fields.get(key) else []
        lines.append(
            (f"`algorithm.{key}`", cell(getattr(made, key)), prose(allowed.get(key, "")), prose("; ".join(meaning)))
        )
    return table(("key", "default", "must be", "meaning"), lines)


def restrictions(made: FedAvg) -> str:
    """What an algorithm is defined for, where that is less than FedAvg."""
    limits = [
        ("local.optimizer=", made.optimizers, FedAvg.optimizers),
        ("scenario=", made.scenarios, FedAvg.scenarios),
        ("", made.inputs, FedAvg.inputs),
    ]
    said = [f"`{key}{' or '.join(values)}`" for key, values, every in limits if set(values) != set(every)]
    return f"Only with {'; '.join(said)}." if said else ""


@cache
def requirements() -> str:
    return requirements_table(CONF / "algorithm")


def needs_table(name: str) -> str:
    """What it needs beyond FedAvg, with its variants; those without a row exchange nothing (centralised twins)."""
    head, rule, *lines = requirements().splitlines()
    mine = [line for line in lines if line.startswith(f"| `{name}` ")]
    return "\n".join([head, rule, *mine]) if mine else ""


def used_in(name: str) -> list[str]:
    """Sweeps of conf/sweep that run it."""
    return [sweep.name for sweep in sweeps() if name in methods(sweep)]


def algorithm_page(name: str) -> str:
    base, schema = builds_on(name), type(algorithm(name))
    says = description(algorithm_file(name)).rstrip(".")
    parts = [f"# {title(name)}", f"{prose(says)}.", f"```sh\nfedexp algorithm={name}{companions(name)}\n```"]
    if base:
        parts.append(f"Everything else is [{title(base)}]({base}.md).")
    else:
        module = importlib.import_module(schema.__module__)
        parts += ["## What it does", from_docstring(module.__doc__ or "")]
        if schema.__doc__ and not schema.__doc__.startswith(f"{schema.__name__}("):  # the latter is a dataclass's own
            parts.append(from_docstring(schema.__doc__))
    parts += [
        "## Options",
        options_table(name),
        restrictions(algorithm(name)),
        prose(" ".join(comments(algorithm_file(name)))),
    ]
    if needs := needs_table(name):
        parts += ["## Needs beyond FedAvg", needs]
    if tuned := sorted((CONF / "tuned").glob(f"*_{name}.yaml")):
        parts += ["## Values of a paper for a data set", "Used by themselves with this data set and algorithm."]
        parts += [f"`conf/tuned/{path.name}`:\n\n```yaml\n{path.read_text(encoding='utf-8')}```" for path in tuned]
    if names := used_in(name):
        parts += ["## In the papers' tables", ", ".join(f"`sweep={each}`" for each in names) + "."]
    source = Path(inspect.getfile(schema)).resolve().relative_to(ROOT)
    parts.append(f"Source: `{source.as_posix()}`, `conf/algorithm/{name}.yaml`.")
    return "\n\n".join(part for part in parts if part) + "\n"


def companions(name: str) -> str:
    """Options without which a method refuses to run, or has nothing to do."""
    made, given = algorithm(name), ""
    if made.needs.surrogate or "none" not in made.scenarios or made.paradigm == "centralized":
        given += " scenario=class_incremental partition=shards"
    if made.needs.public:
        given += " public.fraction=0.025"
    return given + (" surrogate.fraction=0.2" if made.needs.surrogate else "")


def algorithm_index() -> str:
    """Every algorithm with its line, and the table of what each needs."""
    lines = []
    for name in algorithms():
        says = description(algorithm_file(name)).partition(":")[2].strip()
        lines.append((f"[{title(name)}]({name}.md)", f"`algorithm={name}`", prose(says)))
    return table(("method", "option", "what it is"), lines)


# --- the papers


@cache
def sweeps() -> tuple[Sweep, ...]:
    return tuple(load_sweep(name, [CONF]) for name in list_options("sweep", [CONF]))


def methods(sweep: Sweep) -> set[str]:
    fixed = {text.partition("=")[2] for b in sweep.blocks for text in b.fixed if text.startswith("algorithm=")}
    return fixed.union(*(block.axes.get("algorithm", ()) for block in sweep.blocks))


def committed(sweep: str) -> str:
    """What the committed table of a sweep says: its verdicts, counted."""
    path = ROOT / "multirun" / sweep / "table.csv"
    if not path.exists():
        return "no table committed yet"
    with path.open(encoding="utf-8", newline="") as file:
        counts = Counter(row["verdict"] for row in csv.DictReader(file))
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())


def paper_tables(paper: str) -> str:
    """The tables and figures of a paper as sweeps, with the command and the state of each."""
    mine = sorted((s for s in sweeps() if s.paper == paper), key=lambda s: natural(s.name))
    lines = []
    for sweep in mine:
        jobs = sum(len(list(block.combinations())) for block in sweep.blocks)
        what = prose(sweep.title.partition(": ")[2])
        which = sweep.title.partition(": ")[0].removeprefix(f"{paper} ")
        printed = len(printed_cells(sweep))
        lines.append((which, what, f"`sweep={sweep.name}`", str(jobs), str(printed), committed(sweep.name)))
    head = ("in the paper", "what", "name", "runs a seed", "printed values", "verdicts of the committed table")
    return "\n\n".join([table(head, lines), "\n".join(sweep_notes(mine)), measured(paper)]).strip()


def measured(paper: str) -> str:
    """Links to what REPRODUCTION.md has measured of it."""
    text = (ROOT / "REPRODUCTION.md").read_text(encoding="utf-8")
    found = [name for name in re.findall(r"^## (.+)$", text, re.MULTILINE) if paper in name]
    links = [f"[{name}](../../REPRODUCTION.md#{slug(name)})" for name in found]
    return f"Measured, in part at a reduced budget: {', '.join(links)}." if links else ""


def sweep_notes(mine: list[Sweep]) -> Iterator[str]:
    """What the sweeps' files say beyond their titles, each once."""
    said: dict[str, list[str]] = {}
    for sweep in mine:
        if note := " ".join(comments(CONF / "sweep" / f"{sweep.name}.yaml")):
            said.setdefault(note, []).append(f"`{sweep.name}`")
    for note, names in said.items():
        yield f"- {', '.join(names)}: {prose(note)}"


def suspects(paper: str) -> str:
    """Printed values that cannot be right; the report never judges by them."""
    with TABLES.open(encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["paper"] == paper and row["note"].startswith("suspect: ")]
    why: dict[tuple[str, str], list[str]] = {}
    for row in found:
        why.setdefault((row["table"], row["note"].removeprefix("suspect: ")), []).append(
            f"{row['method']} {row['value']}"
        )
    return "\n".join(f"- Table {number}, {', '.join(cells)}: {note}." for (number, note), cells in why.items())


def natural(name: str) -> list[Any]:
    """Sorts numbers by their value."""
    return [float(part) if part[:1].isdigit() else part for part in re.split(r"(\d+(?:\.\d+)?)", name)]


def paper_settings(paper: str) -> str:
    """The paper's settings (`experiment=`), with what each is."""
    names = [name for name in list_options("experiment", [CONF]) if name.startswith(f"{paper.lower()}/")]
    lines, notes = [], []
    for name in sorted(names, key=natural):
        path = CONF / "experiment" / f"{name}.yaml"
        lines.append((f"`experiment={name}`", prose(description(path))))
        notes.append(" ".join(comments(path)))
    sources = "\n".join(f"- {prose(note)}" for note in dict.fromkeys(notes) if note)
    first = CONF / "experiment" / f"{sorted(names, key=natural)[0]}.yaml"
    whole = f"The first of them, whole:\n\n```yaml\n{first.read_text(encoding='utf-8')}```"
    return "\n\n".join([table(("setting", "what"), lines), sources, whole])


def paper_methods(paper: str) -> str:
    """The methods in the paper's tables, with the pages of the algorithms."""
    names = sorted(set().union(*(methods(sweep) for sweep in sweeps() if sweep.paper == paper)))
    return ", ".join(f"[{title(name)}](../algorithms/{name}.md)" for name in names) + "."


# --- metrics


def functions(module_name: str) -> str:
    """The public functions of a module: signature and docstring."""
    module = importlib.import_module(module_name)
    parts = [from_docstring(module.__doc__ or "")]
    for name, function in vars(module).items():
        if inspect.isfunction(function) and function.__module__ == module_name and not name.startswith("_"):
            parts += [f"### `{name}`", f"```python\n{name}{inspect.signature(function)}\n```"]
            parts.append(from_docstring(function.__doc__ or ""))
    return "\n\n".join(parts)


def metric_options() -> str:
    """The options of the group `forgetting_metric`."""
    parts = []
    for name in list_options("forgetting_metric", [CONF]):
        path = CONF / "forgetting_metric" / f"{name}.yaml"
        node = {"_target_": yaml.safe_load(path.read_text(encoding="utf-8"))["_target_"]}
        schema = find_class(node["_target_"], "forgetting_metric._target_")
        keys = "; ".join(f"`forgetting_metric.{k}`: {v}" for k, v in yaml_comments(path).items())
        parts += [f"### `forgetting_metric={name}`", prose(description(path)), prose(" ".join(comments(path)))]
        parts += [from_docstring(schema.__doc__ or ""), prose(keys)]
    return "\n\n".join(part for part in parts if part)


def command_line() -> str:
    """What `fedexp --help` prints."""
    return f"```text\n{help_text(CONF, [])}\n```"


DIRECTIVES = {
    "algorithm-index": algorithm_index,
    "paper-tables": paper_tables,
    "paper-settings": paper_settings,
    "paper-methods": paper_methods,
    "paper-suspects": suspects,
    "functions": functions,
    "metric-options": metric_options,
    "command-line": command_line,
}
