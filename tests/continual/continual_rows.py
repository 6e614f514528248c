"""Rows of the methods of fedexp_continual for the generic tests (see method_rows.py)."""

from dataclasses import fields

from toy_models import Adapted, AdaptedNormed, TinyTransformer

from fedexp_continual.algorithms.afcl import AFCL
from fedexp_continual.algorithms.ccvr import CCVR
from fedexp_continual.algorithms.codaprompt import CODAPrompt
from fedexp_continual.algorithms.dualprompt import DualPrompt
from fedexp_continual.algorithms.fedcbdr import FedCBDR
from fedexp_continual.algorithms.glfc import GLFC
from fedexp_continual.algorithms.l2p import L2P
from fedexp_continual.algorithms.lorm import LoRM
from fedexp_continual.algorithms.mfcl import MFCL
from fedexp_continual.algorithms.pilora import PILoRA
from fedexp_continual.algorithms.regmean import RegMean
from fedexp_continual.algorithms.target import TARGET
from fedexp_continual.data.streams import ClassStream
from method_rows import Row, TaskRow
from toy_federation import TWO_TASKS

ONE_TASK = [
    Row(AFCL, live=dict(gamma=0.5)),
    Row(RegMean, live=dict(off_diagonal=0.5)),
    Row(
        CCVR,
        live=dict(samples=6, epochs_on_server=2, batch_size=4, lr=0.1, covariance="full"),
        other=dict(samples=3, epochs_on_server=1, batch_size=2, covariance="diagonal"),
    ),
]
ROWS = [
    TaskRow(
        TARGET,
        dict(kd=5.0, temperature=2.0, batches=2, batch_size=4, steps=4, lr_generator=0.05, width=4),
        other=dict(batches=1, batch_size=2, steps=2, width=2),
        at_once=True,
    ),
    TaskRow(
        MFCL,
        dict(ft=0.8, kd=0.5, batches=2, batch_size=4, steps=4, lr_generator=0.05, width=4),
        other=dict(batches=1, batch_size=2, steps=2, width=2),
        at_once=True,
    ),
    TaskRow(
        FedCBDR,
        dict(
            samples=6, tau_old=0.8, tau_new=1.4, omega_old=1.2, omega_new=0.6, selection="leverage"
        ),
        other=dict(samples=3, selection="random"),
        keeps=True,
    ),
    TaskRow(
        GLFC,
        dict(memory=4, lambda_gc=0.5, lambda_rd=0.5, compensation=True, proxy=True),
        other=dict(memory=2),
        silent=("proxy",),
        at_once=True,
        keeps=True,
    ),
    TaskRow(
        GLFC,
        dict(memory=4, lambda_gc=0.5, lambda_rd=0.5, compensation=False, proxy=False),
        other=dict(memory=2),
        silent=("proxy",),
        at_once=True,
        keeps=True,
    ),
]
ADAPTED = [  # what trains low-rank adapters
    TaskRow(
        PILoRA,
        dict(temperature=0.5, lambda_pl=0.5, gamma=0.5, l1=0.1, adapter_rate=0.5),
        model=Adapted(),
        normed=AdaptedNormed(),
        at_once=True,
    ),
    TaskRow(
        LoRM,
        dict(off_diagonal=0.5, head_off_diagonal=0.3, a_rate=0.5, b_rate=2.0, weight_decay=0.01),
        model=Adapted(),
        normed=AdaptedNormed(),
        at_once=True,
    ),
]
PROMPTED = [  # what trains prompts of a transformer, which has no batch norm
    TaskRow(
        L2P,
        dict(pool=4, selected=2, length=2, lambda_pull=0.5),
        other=dict(pool=5, selected=1, length=3),
        model=TinyTransformer(),
        normed=None,
        at_once=True,
    ),
    TaskRow(
        DualPrompt,
        dict(
            general_layers=(0,), general_length=2, task_layers=(1,), task_length=3, lambda_match=0.5
        ),
        other=dict(general_layers=(2,), general_length=3, task_layers=(2,), task_length=2),
        model=TinyTransformer(),
        normed=None,
        at_once=True,
    ),
    TaskRow(
        CODAPrompt,
        dict(layers=(0, 1), components=5, length=4, ortho=0.5),
        other=dict(layers=(1,), components=4, length=2),
        model=TinyTransformer(),
        normed=None,
        at_once=True,
    ),
]
OF_MODELS = [*ADAPTED, *PROMPTED]
# the two tasks of TWO_TASKS
STREAM = ClassStream(**{f.name: getattr(TWO_TASKS, f.name) for f in fields(TWO_TASKS)})


# --- what test_client_states.py expects

CALIBRATION = CCVR(samples=2, epochs_on_server=1, batch_size=4, lr=0.1, covariance="full")
NUMBERS = [
    # a matrix of 8 x 8 and one of 8 x 4; the classifier
    ("AFCL", (AFCL(gamma=0.1), (96, 96), 36)),
    # the model, and matrices of 27 x 27 and 8 x 8 for the inputs of its linear layers
    ("RegMean", (RegMean(off_diagonal=0.5), (1083, 1083), 290)),
    # with the model, for each of four classes a count, 8 means and 8 x 8 covariances; two models
    ("CCVR", (CALIBRATION, (582, 582), 580)),
]
