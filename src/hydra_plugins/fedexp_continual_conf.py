"""Adds conf/ of fedexp_continual to Hydra's search path, so that fedexp has its options."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

CONF = Path(__file__).parents[1] / "fedexp_continual" / "conf"


class ContinualSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("fedexp_continual", f"file://{CONF}")
