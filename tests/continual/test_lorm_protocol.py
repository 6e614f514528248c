"""LoRM's experiments: what they compose to, and a job of its sweep on tiny photographs."""

from itertools import chain

import numpy as np
import pytest

from fedexp.analysis.sweep import expand, launches, load_sweep
from fedexp.config.build import build
from fedexp.config.options import conf_directories
from fedexp.data.datasets import ImageFolder
from toy_federation import composed

SWEEP = load_sweep("lorm_table1", conf_directories())
JOBS = [job for each in launches(SWEEP, []) for job in expand(each)]
# data set -> tasks, classes of a task, rounds, values of beta, rank and rates of LoRM for each
# (rank, head, B, A), as in the commands in the README of aimagelab/fed-mammoth
PRINTED = {
    "cifar100": (10, {10}, 5, "0.5 0.1 0.05", [(1, 3e-3), (16, 3e-4), (16, 5e-4)]),
    "imagenet_r": (10, {20}, 5, "0.5 0.1 0.05", [(2, 3e-3), (32, 1e-3), (16, 1e-3)]),
    "imagenet_a": (10, {20}, 10, "1.0 0.5 0.2", [(4, 1e-2, 1e-3, 1e-2)] * 3),
    "eurosat": (5, {2}, 5, "1.0 0.5 0.2", [(1, 3e-3), (1, 1e-3), (1, 3e-3)]),
    "cars196": (
        *(10, {20, 16}, 10, "1.0 0.5 0.2"),
        [(8, 1e-2, 1e-3, 1e-2), (8, 1e-2, 1e-3, 1e-2), (4, 1e-2, 1e-3, 1e-2)],
    ),
    "cub200": (
        *(10, {20}, 5, "1.0 0.5 0.2"),
        [(1, 1e-2, 1e-2, 3e-3), (1, 3e-2, 3e-2, 1e-3), (1, 3e-2, 3e-2, 3e-3)],
    ),
}
CLASSES = {"cifar100": 100, "cars196": 196, "eurosat": 10}


def lorm_job(dataset: str, beta: str) -> list[str]:
    wanted = {f"experiment=lorm/{dataset}", f"alpha={beta}", "algorithm=lorm"}
    (job,) = [job for job in JOBS if wanted <= {*job}]
    return list(job)


@pytest.mark.parametrize("dataset", PRINTED)
def test_jobs_of_lorm_have_the_released_values(dataset):
    tasks, sizes, rounds, betas, rates = PRINTED[dataset]
    for beta, (rank, head, *both) in zip(betas.split(), rates, strict=True):
        built = build(composed(*lorm_job(dataset, beta)))
        algorithm, local, b, a = built.algorithm, built.local, *(both or [head, head])
        assert built.partition.alpha == float(beta)
        assert (built.model.lora.rank, local.lr) == (rank, head)
        assert algorithm.b_rate * local.lr == pytest.approx(b, rel=1e-5)
        assert algorithm.a_rate * local.lr == pytest.approx(a, rel=1e-5)
        assert algorithm.off_diagonal == 0
        assert algorithm.head_off_diagonal == (0.3 if dataset == "cub200" else 0.5)
    split = built.scenario.task_classes(CLASSES.get(dataset, 200), np.random.default_rng(0))
    assert len(split) == tasks
    assert {len(classes) for classes in split} == sizes
    assert [*chain(*split)] == [*range(CLASSES.get(dataset, 200))]
    assert built.settings.num_clients == built.settings.cohort_size == 10
    assert built.scenario.rounds_per_task == rounds
    assert (local.optimizer, local.batch_size, local.epochs) == ("adamw", 16, 5)
    assert local.weight_decay == 0
    assert built.dataset.augmentation.size == built.model.image_size == 224
    if isinstance(built.dataset, ImageFolder) and built.dataset.counts is not None:
        expected = composed(f"experiment=lorm/{dataset}").expected
        counts = (expected.train, expected.test, expected.classes)
        assert tuple(built.dataset.counts) == counts
