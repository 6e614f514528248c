"""Subcommands, keys and options that no longer exist, and what to use instead."""

REMOVED = {  # subcommand, key or group=option -> replacement
    "algorithm=affcl": "algorithm=mfcl or algorithm=target",
    "algorithm=lander": "algorithm=target or algorithm=mfcl",
    "partition=flower": "partition=file partition.path=<file with the partition>",
    "tracker=mlflow": "tracker=wandb or tracker=tensorboard",
}


def explain_removed(name: str) -> str | None:
    """Return the message for a name that was removed, or None for any other name."""
    return f"{name}: no longer exists; use {REMOVED[name]}" if name in REMOVED else None
