"""The code of docs/guide/python.md and of its notebook runs."""

import json
import re
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "docs" / "guide"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of_the_page() -> list[str]:
    return BLOCK.findall((GUIDE / "python.md").read_text(encoding="utf-8"))


def cells_of_the_notebook() -> list[str]:
    cells = json.loads((GUIDE / "python.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty directory, and make runs small."""
    import matplotlib

    import fedexp

    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    train = fedexp.run
    small = [
        "hardware.engine=sequential",
        "hardware.threads=1",
        "figures=false",
        "participation=0.03",
    ]
    monkeypatch.setattr(
        fedexp, "run", lambda overrides, **given: train([*overrides, *small], **given)
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocks", [blocks_of_the_page(), cells_of_the_notebook()], ids=["page", "notebook"]
)
def test_code_of_the_page_runs(
    blocks: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"{here.name}: {block.splitlines()[0]}", "exec"), names)
    assert "algorithm=fedntdd: no such option (nearest: 'fedntd')" in capsys.readouterr().out
    assert (here / "model.pt").stat().st_size > 100_000
    assert "fedexp" in sys.modules
