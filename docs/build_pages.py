"""The pages of the site: the markdown files of the repository at their own paths, and one page per
algorithm.

mkdocs runs this file (plugin gen-files), so links work in the repository and on the site alike.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs runs this file from elsewhere
from generated import ROOT, algorithm_page, algorithms

PAGES = ("*.md", "benchmarks/*.md", "docs/*.md", "docs/*/*.md")
ASSETS = (
    "LICENSE",
    "CITATION.cff",
    "conf/**/*.yaml",
    "src/*/conf/**/*.yaml",
    "src/fedexp/algorithms/*.py",
    "docs/**/*.png",
    "examples/*.ipynb",
    "docs/**/*.svg",
    "benchmarks/*.svg",
    "docs/reproduction/*.csv",
    "multirun/*/table.csv",
    "multirun/*/comparison.csv",
)
OPTION = re.compile(r"\.\./\.\./(?:src/\w+/)?conf/algorithm/(\w+)\.yaml")  # on the site, a page


def committed(*patterns: str) -> list[Path]:
    """Return the files of the repository that the patterns name, sorted."""
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def pages() -> dict[str, str]:
    """Return the markdown of every page by its path on the site."""
    found = {
        p.relative_to(ROOT).as_posix(): OPTION.sub(
            r"../algorithms/\1.md", p.read_text(encoding="utf-8")
        )
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
