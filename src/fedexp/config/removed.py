"""Subcommands, keys and options that no longer exist, and what to use instead."""

REMOVED = {  # subcommand, key or group=option -> replacement
    "analyse": "`fedexp-papers analyse <dir> <kind>`",
    "algorithm=affcl": "algorithm=mfcl or algorithm=target",
    "algorithm=lander": "algorithm=target or algorithm=mfcl",
    "tracker=several": "tracker=[wandb,tensorboard]",
    "analysis=several": "analysis=[weight_divergence,cka]",
    "forgetting_metric=several": "forgetting_metric=[forgetting,events]",
    "budget": "`timeout 120m fedexp ...`, which saves; the same command continues the sweep",
    "dataset=ag_news": "dataset=huggingface_text dataset.path=fancyzhx/ag_news",
    "dataset=emnist": "dataset=torchvision dataset.name=EMNIST, with its arguments",
    "dataset=shakespeare": "dataset=huggingface_text with dataset.owner=<column>",
    "dataset=svhn": "dataset=torchvision dataset.name=SVHN",
    "forgetting_metric=backward_transfer": "forgetting_metric=forgetting",
    "hardware.jobs_per_gpu": "hydra.launcher.n_jobs; the jobs use the GPUs in turn",
    "hydra.sweeper.pruner": "stop.patience, which ends runs that no longer improve",
    "hydra.sweeper.startup_trials": "hydra.sweeper.sampler=random for the first trials",
    "hydra.sweeper.warmup_rounds": "stop.patience, which ends runs that no longer improve",
    "import": "fedexp.measure in Python",
    "local_evaluation.examples": "local_evaluation.every, which tests fewer rounds",
    "model=lstm": "model=textcnn, or your own model",
    "partition=flower": "partition=file partition.path=<file with the partition>",
    "profile": "`python -m cProfile -m fedexp ...` or py-spy",
    "requirements": "docs/algorithms/index.md, which has the table",
    "push": "`wandb sync <run directory>/wandb/offline-run-...`",
    "reproduction": "`fedexp-papers compare <sweep>`, or `make reproduction` in a checkout",
    "tracker=mlflow": "tracker=wandb or tracker=tensorboard",
    "view": "`fedexp report <dir>`, which writes index.html",
}


def explain_removed(name: str) -> str | None:
    """Return the message for a name that was removed, or None for any other name."""
    return f"{name}: no longer exists; use {REMOVED[name]}" if name in REMOVED else None
