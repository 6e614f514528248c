"""The pages of the site: the markdown files of the repository at their own paths, and one page per
algorithm.

mkdocs runs this file (plugin gen-files), so links work in the repository and on the site alike. In
a page, a line `::: name argument` is replaced by what a function of generated/ makes from yaml
files, docstrings and tables.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs runs this file from elsewhere
from generated import DIRECTIVES, ROOT, algorithm_page, algorithms

PAGES = ("*.md", "benchmarks/*.md", "docs/*.md", "docs/*/*.md")
ASSETS = (
    "LICENSE",
    "CITATION.cff",
    "docs/**/*.png",
    "docs/**/*.ipynb",
    "docs/**/*.svg",
    "docs/reproduction/*.csv",
    "multirun/*/table.csv",
    "multirun/*/comparison.csv",
)
CODE = r"^```.*?^```$"
OPTION = re.compile(r"\.\./\.\./conf/algorithm/(\w+)\.yaml")  # on the site, it has a page
DIRECTIVE = re.compile(rf"({CODE})|^::: ([\w-]+) ?([^\n]*)$", re.MULTILINE | re.DOTALL)


def committed(*patterns: str) -> list[Path]:
    """Return the files of the repository that the patterns name, sorted."""
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def render(text: str) -> str:
    """Replace the directives of a page outside code blocks."""
    text = OPTION.sub(r"../algorithms/\1.md", text)
    return DIRECTIVE.sub(lambda m: m[1] or DIRECTIVES[m[2]](*m[3].split()), text)


def pages() -> dict[str, str]:
    """Return the markdown of every page by its path on the site."""
    found = {
        p.relative_to(ROOT).as_posix(): render(p.read_text(encoding="utf-8"))
        for p in committed(*PAGES)
    }
    return found | {f"docs/algorithms/{name}.md": algorithm_page(name) for name in algorithms()}


def main() -> None:
    """Write the pages, and the files that they link to, into the site."""
    import mkdocs_gen_files

    for path, text in pages().items():
        with mkdocs_gen_files.open(path, "w") as page:
            page.write(text)
    for file in committed(*ASSETS):
        with mkdocs_gen_files.open(file.relative_to(ROOT).as_posix(), "wb") as asset:
            asset.write(file.read_bytes())


if __name__ == "<run_path>":  # the name that gen-files gives it
    main()
