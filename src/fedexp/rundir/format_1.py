"""Hash of a configuration before fingerprints had a format number, to recognise what was made then.

It took the paths of classes and of data. Classes move, so their paths of then stand here. Nothing
is ever added: a class that is newer counts by its name.
"""

from typing import Any

PATHS = (
    "algorithms.base.FedAvg",
    "algorithms.cfed.CFeD",
    "algorithms.fedala.FedALA",
    "algorithms.fedalign.FedAlign",
    "algorithms.fedavgm.FedAvgM",
    "algorithms.fedcurv.FedCurv",
    "algorithms.feddf.FedDF",
    "algorithms.feddmc.FedDMC",
    "algorithms.feddyn.FedDyn",
    "algorithms.fedewc.FedEWC",
    "algorithms.fedfomo.FedFOMO",
    "algorithms.fedka.FedKA",
    "algorithms.fedkd.FedKD",
    "algorithms.fedlwf.FedLwF",
    "algorithms.fedmultihead.FedMultiHead",
    "algorithms.fednova.FedNova",
    "algorithms.fedntd.FedNTD",
    "algorithms.fedpac.FedPAC",
    "algorithms.fedprox.FedProx",
    "algorithms.fedreg.FedReg",
    "algorithms.fedrod.FedRoD",
    "algorithms.flashback.Flashback",
    "algorithms.moon.Moon",
    "algorithms.scaffold.Scaffold",
    "data.augment.Augmentation",
    "data.datasets.Caltech256",
    "data.datasets.Cinic10",
    "data.datasets.Digits",
    "data.datasets.Femnist",
    "data.datasets.ImageFolder",
    "data.datasets.TinyImageNet",
    "data.datasets.TorchvisionDataset",
    "data.partition.IID",
    "data.partition.Natural",
    "data.partition.Sharding",
    "data.partition.Shards",
    "data.partition_file.File",
    "data.partition_lda.LDA",
    "data.tasks.ClassIncremental",
    "data.tasks.DomainIncremental",
    "data.tasks.OneTask",
    "data.text.TextDataset",
    "data.text.UnlabelledTexts",
    "hardware.Hardware",
    "metrics.forgetting_metric.Alignment",
    "metrics.forgetting_metric.All",
    "metrics.forgetting_metric.BackwardTransfer",
    "metrics.forgetting_metric.Consistency",
    "metrics.forgetting_metric.ForgettingDegree",
    "metrics.forgetting_metric.InOutLocal",
    "metrics.forgetting_metric.RoundDrop",
    "models.cnn.CNN",
    "models.resnet.BottleneckResNet",
    "models.resnet.CifarResNet",
    "models.resnet.TorchvisionResNet",
    "models.textcnn.TextCNN",
)
FORMER = {path.rpartition(".")[2]: f"fedexp.{path}" for path in PATHS}  # name of a class -> path

FREE = (
    *("resume", "tracker", "checkpoint_interval", "figures", "profile", "data_dir", "choices"),
    *("dataset.data_dir", "dataset.url"),
    *(
        "hardware.device",
        "hardware.engine",
        "hardware.threads",
        "hardware.workers",
        "hardware.chunk",
    ),
    "hardware.jobs_per_gpu",
)


def with_paths(node: Any) -> Any:
    """Return nested dicts and lists in which every `_target_` of fedexp has its path of then."""
    if isinstance(node, list):
        return [with_paths(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: former(value) if key == "_target_" else with_paths(value)
        for key, value in node.items()
    }


def former(target: Any) -> Any:
    """Return the path of a class of fedexp as it was, by its name; any other as it is."""
    name = str(target).rpartition(".")[2]
    return FORMER.get(name, name) if str(target).startswith("fedexp.") else target
