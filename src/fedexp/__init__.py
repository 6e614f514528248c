"""fedexp: federated-learning experiments that measure forgetting."""

from pathlib import Path

__version__ = "0.1.0"
# `python -m fedexp.report` and its like, which scripts of users call, lie in a folder of their own.
__path__.append(str(Path(__file__).parent / "cli" / "aliases"))
