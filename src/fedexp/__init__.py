"""fedexp: federated-learning experiments that measure forgetting."""

__version__ = "0.1.0"
