"""Adds the sweeps and experiments of fedexp_papers to Hydra's search path.

Hydra imports this module at every start, so it imports nothing else.
"""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

CONF = Path(__file__).resolve().parents[1] / "fedexp_papers" / "conf"


class Papers(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("fedexp_papers", f"file://{CONF}")
