"""Another package brings its own conf/ with a plugin for Hydra, and fedexp finds its options."""

import os
import subprocess
import sys
from pathlib import Path

FILES = {
    "hydra_plugins/mine/__init__.py": """
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class Mine(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("mine", f"file://{Path(__file__).parents[2] / 'mine' / 'conf'}")
""",
    "mine/conf/algorithm/mine.yaml": """# Mine: of another package
_target_: fedexp.algorithms.fedprox.FedProx
mu: 3.0
""",
    "mine/conf/sweep/mine_table.yaml": "blocks: [{algorithm: {mine: {}}, seed: {0: {}, 1: {}}}]",
}
COMMANDS = (
    ["algorithm=mine", "--cfg", "job", "--package", "algorithm"],
    ["algorithm=mina"],
    ["algorithm=fedavg", "algorithm.mu=1", "--cfg", "job"],
)
CALL = """
import sys
from fedexp.cli.main import main
print(*map(main, {}), file=sys.stderr)
main(["--help"])
"""


def test_options_of_another_package_are_found(tmp_path: Path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", CALL.format(COMMANDS)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    printed, messages = done.stdout, done.stderr
    assert "_target_: fedexp.algorithms.fedprox.FedProx\nmu: 3.0\n" in printed
    assert "algorithm=mina: no such option (nearest: 'mine')" in messages
    assert "algorithm.mu: only exists with" in messages
    assert "algorithm=mine" in messages.split("algorithm.mu: only exists with")[1].splitlines()[0]
    assert messages.splitlines()[-1] == "0 2 2"
    sweeps = next(line for line in printed.splitlines() if line.startswith("sweep: "))
    assert "mine_table" in sweeps.split(", ")
