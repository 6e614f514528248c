"""The code of docs/guide/python.md and of examples/first_look.ipynb runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_look.ipynb"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of_the_page() -> list[str]:
    return BLOCK.findall((ROOT / "docs/guide/python.md").read_text(encoding="utf-8"))


def cells_of_the_notebook() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


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
        "local.epochs=1",
        "participation=0.03",
    ]
    monkeypatch.setattr(
        fedexp, "run", lambda overrides, **given: train([*overrides, *small], **given)
    )
    return tmp_path


def execute(blocks: list[str]) -> dict[str, Any]:
    """Execute the blocks one after the other with the same names, and return the names."""
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, block.splitlines()[0], "exec"), names)
    return names


@pytest.mark.slow
def test_code_of_the_page_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    execute(blocks_of_the_page())
    assert "algorithm=fedntdd: no such option (nearest: 'fedntd')" in capsys.readouterr().out
    assert (here / "model.pt").stat().st_size > 100_000


@pytest.mark.slow
def test_notebook_runs(here: Path) -> None:
    cells = ["".join(cell["source"]) for cell in cells_of_the_notebook()]
    names = execute([cell.replace("rounds=20", "rounds=3") for cell in cells])
    table, runs = names["table"], names["runs"]
    assert list(table.index) == ["fedavg", "fedntd"]
    for name, mine in runs.groupby("algorithm"):
        assert len(mine) == 2
        assert table.loc[name].item().startswith(f"{100 * mine['accuracy'].mean():.2f} ± ")


def test_notebook_has_the_outputs_that_readers_see() -> None:
    cells = cells_of_the_notebook()
    assert len(cells) == 12
    assert NOTEBOOK.stat().st_size < 400_000
    kinds = [kind for cell in cells for each in cell["outputs"] for kind in each.get("data", ())]
    assert kinds.count("image/png") == 5
    assert kinds.count("text/html") == 3
    assert not [
        each for cell in cells for each in cell["outputs"] if each["output_type"] == "error"
    ]
