"""The documentation's site builds, and its search works without a network."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from browser import chromium, find_chromium

ROOT = Path(__file__).parents[1]
QUIET = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no chromium here (apt-get install chromium)")
def test_search_of_the_site_works_offline(tmp_path):
    for package in ("material", "mkdocs_gen_files", "mkdocs_literate_nav"):
        pytest.importorskip(package)
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(
        build, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with chromium() as page:
        page.look(1400, 900)
        page.open(tmp_path / "site" / "index.html")
        page.run("document.querySelector('[data-md-component=search-query]').focus()")
        field = "document.querySelector('[data-md-component=search-query]')"
        page.run(
            f"{field}.value = 'Dirichlet'; {field}.dispatchEvent(new Event('input', {{bubbles:"
            " true}))"
        )
        page.run(f"{field}.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}}))")
        found, until = [], time.monotonic() + 20
        while not found and time.monotonic() < until:
            time.sleep(0.2)
            found = page.run(
                "[...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)"
            )
        assert found, page.errors
        assert all(address.startswith("file:") for address in found)
        assert [
            address
            for address in page.requests
            if not address.startswith(("file:", "data:", "blob:"))
        ] == []
