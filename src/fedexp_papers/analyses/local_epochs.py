"""The accuracy of local models before training and after each local epoch."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from fedexp.core.limits import CountOrNone
from fedexp.core.tree import Params
from fedexp.engine.base import ClientRuntime
from fedexp.metrics.accuracy import class_accuracy
from fedexp.metrics.forgetting import in_out_local
from fedexp_papers.analyses.base import Analysis, Measured, Row


class LocalEpochs(Analysis):
    """`local_epochs.csv`: accuracy of local models before training and after each epoch.

    These values are plotted in FedNTD, Fig. 6. The file has a row for each round, client and epoch;
    epoch 0 is before training. It contains the accuracies on the test set, on the client's in-local
    and out-local distributions (FedNTD Definition 1), and on the client's training examples without
    augmentation.
    """

    file = "local_epochs.csv"
    columns = (
        *("round", "client", "epoch", "test_accuracy", "in_local_accuracy"),
        *("out_local_accuracy", "train_accuracy"),
    )
    # True: test after every epoch; False: only before the first and after the last epoch
    between: bool
    clients: CountOrNone  # how many clients to test per round, in cohort order; None: all
    reads_epochs = True
    means: ClassVar = {name: f"epochs_{name}" for name in columns[3:]}

    def rows(self, measured: Measured) -> list[dict[str, Any]]:
        rows = []
        for position, client in enumerate(measured.clients[: self.clients]):
            models = measured.exchange.trained.epochs[position]
            last = len(models) - 1
            for epoch, model in enumerate(models):
                if self.between or epoch in (0, last):
                    part = measured.exchange.round.federation.parts[client]
                    counts = measured.counts[position]
                    row = {"round": measured.record.round, "client": client, "epoch": epoch}
                    rows.append(row | accuracies(measured.runtime, model, part, counts))
        return rows

    def averaged(self, rows: Sequence[Row]) -> dict[str, list[Row]]:
        last = {row["client"]: row for row in rows}  # epochs ascend
        before = [row for row in rows if row["epoch"] == 0]
        return {"_before": before, "_after": list(last.values())}


def accuracies(
    runtime: ClientRuntime, model: Params, part: np.ndarray, counts: np.ndarray
) -> dict[str, float]:
    """Return the accuracies of a client's model.

    They are those on the test set, on the client's in-local and out-local distribution, and on its
    training examples. The last one is nan if the client has none or if each task has a head.

    model: parameters and buffers. part: the indices of the client's training examples. counts: the
    number of its training labels per class, [C].
    """
    model = {name: leaf.to(runtime.device) for name, leaf in model.items()}
    labels = runtime.data.y_test
    correct = runtime.evaluate(model).class_correct.cpu().numpy()
    totals = torch.bincount(labels, minlength=runtime.data.num_classes).cpu().numpy()
    inside, outside = in_out_local(class_accuracy(correct, totals), counts)
    own = float("nan")
    if runtime.heads is None and len(part):
        numbers = torch.tensor(part, device=runtime.device)
        right = runtime.logits(model, numbers).argmax(-1) == runtime.data.y_train[numbers]
        own = int(right.sum()) / len(part)
    return {
        "test_accuracy": float(correct.sum() / totals.sum()),
        "in_local_accuracy": float(inside),
        "out_local_accuracy": float(outside),
        "train_accuracy": own,
    }
