"""Figures of papers that need the models that runs have kept: as draw_paper, one function each."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedexp.analysis.posthoc import draw
from fedexp.analysis.posthoc.pictures import joint_embedding, noise_result
from fedexp.analysis.sweep_figures import Setting
from fedexp.core.errors import ConfigError
from fedexp.papers.draw_paper import flat, said_of

LINE = 90  # letters of a title


def noise(settings: Sequence[Setting], title: str, **options: Any) -> Figure:
    """Draw loss and accuracy of a model of each run under Gaussian noise on its parameters (FedNTD
    Fig. 14). options: flags of `fedexp analyse <run> noise`."""
    found = [(m.name, *noise_result(m.runs[0], options)) for m in flat(settings)]
    curves = [(label, curve) for label, curve, _ in found]
    models = list(dict.fromkeys(model for _, _, model in found))
    of = (
        models[0]
        if len(models) == 1
        else "a local model of each"
        if "client" in options
        else "the global models"
    )
    subject = f"{said_of(settings, title)}; {of}, {curves[0][1].examples:,} test examples"
    return draw.noise(curves, "\n".join(textwrap.wrap(subject, LINE)))


def joint_tsne(settings: Sequence[Setting], title: str, **options: Any) -> Figure:
    """Draw the t-SNE of the models of all methods together, a row for each setting that has several
    (FedNTD Fig. 21). options: flags of `fedexp analyse <run> tsne`."""
    rows, subjects = [], []
    for setting in settings:
        if len(setting.methods) > 1:
            runs = {method.name: method.runs[0] for method in setting.methods}
            clouds, subject = joint_embedding(runs, options)
            rows.append((setting.name, clouds))
            subjects.append(subject)
    if not rows:
        raise ConfigError("no setting has the runs of two methods")
    subject = subjects[0]
    if not all(np.array_equal(each.labels, subject.labels) for each in subjects):
        raise ConfigError("the settings have different test examples")
    said = f"{said_of(settings, title)}; {len(subject.labels):,} test examples"
    return draw.embedding(
        rows, subject.labels, subject.runtime.data.classes, "\n".join(textwrap.wrap(said, LINE))
    )
