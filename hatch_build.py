"""Write the commit of the checkout into each package that is built from it."""

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file, unless the package is editable or is not built from a checkout."""
        package = "src/fedexp" if self.target_name == "sdist" else "fedexp"
        code = runpy.run_path(str(Path(self.root, "src/fedexp/core/provenance.py")))
        commit = None if version == "editable" else code["commit_of"](Path(self.root).resolve())
        if commit is not None:
            self.folder = tempfile.TemporaryDirectory()
            written = Path(self.folder.name, code["COMMIT"])
            written.write_text(f"{commit}\n")
            build_data["force_include"][str(written)] = f"{package}/{code['COMMIT']}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()
