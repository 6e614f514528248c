"""All pages of the documentation as markdown, by path: those of this folder with their directives replaced, and those
made from README.md (a page a section) and from the algorithms.

A line `::: <name> <argument>` is replaced by what it names: `::: include FILE` or `::: include FILE#section` brings a
file of the repository, or one section of it, below the heading that it stands under; the others are in generated.py.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from generated import DIRECTIVES, ROOT, algorithm_page, algorithms, slug, title

HERE = Path(__file__).resolve().parent
DIRECTIVE = re.compile(r"^::: ([\w-]+) ?(.*)$", re.MULTILINE)
HEADING = re.compile(r"^(#+) (.*)$")
TITLE = re.compile(r"\A(<!--[^>]*-->\s*)?# .*\n")  # with the note of a generated file
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
# Sections of README.md that have a page elsewhere, and those that are shown as parts of a page of this folder.
SHOWN = {
    "fedexp": "index.md",
    "install-and-run": "quickstart.md",
    "the-main-command": "quickstart.md",
    "algorithms": "algorithms/index.md",
    "your-own-algorithm-data-set-or-metric": "extending.md",
    "speed-what-to-use-when": "performance.md",
    "reproduction": "reproduction.md",
}
# Files of the repository and the pages that show them.
FILES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "extending.md",
    "REPRODUCTION.md": "reproduction.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "performance.md",
    "benchmarks/RESULTS.md": "performance.md",
    "benchmarks": "performance.md",
}


def lines_outside_code(text: str) -> Iterator[tuple[str, bool]]:
    """(line, whether it is outside fenced code)."""
    fence = ""
    for line in text.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if fence:
            yield line, False
            fence = "" if mark and line.strip() == fence else fence
        else:
            yield line, mark is None
            fence = mark.group(1) if mark else ""


def sections(text: str, level: int) -> dict[str, tuple[str, str]]:
    """Anchor -> (heading, what stands under it with its subsections), of the headings of one level."""
    found: dict[str, tuple[str, list[str]]] = {}
    current: list[str] = []
    for line, outside in lines_outside_code(text):
        heading = HEADING.match(line) if outside else None
        if heading and len(heading[1]) <= level:
            current = []
            if len(heading[1]) == level:
                found[slug(heading[2])] = heading[2], current
            continue
        current.append(line)
    return {anchor: (name, "\n".join(body).strip()) for anchor, (name, body) in found.items()}


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def guide() -> dict[str, str]:
    """Pages made of README's sections that are shown nowhere else: path -> markdown."""
    pages = {}
    for anchor, (name, body) in sections(readme(), 2).items():
        if anchor not in SHOWN:
            path = f"guide/{anchor}.md"
            pages[path] = f"# {name}\n\n" + embedded(body, "README.md", path, 1)
    return pages


def embedded(text: str, source: str, page: str, level: int) -> str:
    """A piece of a file of the repository as a part of a page, below a heading of this level: its headings lowered or
    raised, its links led to the pages that show what they name."""
    levels = [len(h[1]) for line, outside in lines_outside_code(text) if outside and (h := HEADING.match(line))]
    shift = level + 1 - min(levels, default=level + 1)
    result = []
    for line, outside in lines_outside_code(text):
        if outside and (heading := HEADING.match(line)):
            line = "#" * (len(heading[1]) + shift) + f" {heading[2]}"
        elif outside:
            line = LINK.sub(lambda m: m[1] + led(m[2], source, page) + m[3], line)
        result.append(line)
    return "\n".join(result)


def led(target: str, source: str, page: str) -> str:
    """Where a link of a repository file leads when it stands on a page."""
    if re.match(r"\w+:", target):
        return target
    path, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
    if path == "README.md" and anchor:
        top = {a: a for a in sections(readme(), 2)} | {sub: a for sub, a in subsections().items()}
        page_of = SHOWN.get(top[anchor]) or f"guide/{top[anchor]}.md"
        return relative(page_of, page) + (f"#{anchor}" if anchor not in top.values() or anchor in SHOWN else "")
    if path in FILES:
        return relative(FILES[path], page) + (f"#{anchor}" if anchor else "")
    if path.startswith("docs/"):
        return relative(path.removeprefix("docs/"), page)
    return relative(f"files/{path}", page)


def subsections() -> dict[str, str]:
    """Anchor of a section of level 3 of README.md -> that of the section it belongs to."""
    return {sub: anchor for anchor, (_, body) in sections(readme(), 2).items() for sub in sections(body, 3)}


def relative(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def include(argument: str, page: str, level: int) -> str:
    """`FILE` without its title, or `FILE#anchor` without its heading."""
    name, _, anchor = argument.partition("#")
    text = (ROOT / name).read_text(encoding="utf-8")
    if not anchor:
        body = TITLE.sub("", text)
    elif anchor == "introduction":  # what stands before the first section
        body = TITLE.sub("", text).split("\n## ")[0]
    else:
        body = (sections(text, 2) | sections(text, 3))[anchor][1]
    return embedded(body.strip(), name, page, level)


def written(text: str, page: str) -> str:
    """A page of this folder with its directives replaced."""
    level, result = 1, []
    for line, outside in lines_outside_code(text):
        if outside and (heading := HEADING.match(line)):
            level = len(heading[1])
        if outside and (found := DIRECTIVE.match(line)):
            name, argument = found.groups()
            line = include(argument, page, level) if name == "include" else DIRECTIVES[name](*argument.split())
        result.append(line)
    return "\n".join(result) + "\n"


def own() -> Iterator[str]:
    """The pages that lie in this folder."""
    return (path.relative_to(HERE).as_posix() for path in sorted(HERE.rglob("*.md")))


def pages() -> dict[str, str]:
    """Path -> markdown of every page."""
    found = {path: written((HERE / path).read_text(encoding="utf-8"), path) for path in own()}
    return found | guide() | {f"algorithms/{name}.md": algorithm_page(name) for name in algorithms()}


def navigation(paths: Mapping[str, str]) -> list[dict[str, object]]:
    """What the site's menu shows; pages that are not there (yet) are left out."""
    named = {name: path for path, text in guide().items() for name in [text.splitlines()[0].lstrip("# ")]}
    menu: list[dict[str, object]] = [
        {"Start": "index.md"},
        {"Quick start": "quickstart.md"},
        {"Guide": [{name: path} for name, path in named.items()] + [{"Command line": "command_line.md"}]},
        {"Papers": [{title(name): f"papers/{name}.md"} for name in ("fedntd", "flashback", "fedka", "cfed")]},
        {"Algorithms": ["algorithms/index.md", *({title(n): f"algorithms/{n}.md"} for n in algorithms())]},
        {"Metrics": "metrics.md"},
        {"Reproduction": "reproduction.md"},
        {"Performance": "performance.md"},
        {"Reliability": "reliability.md"},
        {"Extending": "extending.md"},
        {"Errors": "faq.md"},
        {"Changes": "changelog.md"},
    ]
    return [entry for entry in menu if not isinstance(page := next(iter(entry.values())), str) or page in paths]
