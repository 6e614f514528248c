"""Overall and class-wise accuracy, as fractions in [0, 1]."""

import numpy as np


def class_accuracy(correct: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return the class accuracies A_c = correct_c / total_c, int [..., C] -> float64 [..., C].

    correct: numbers of correct predictions. total: numbers of test examples. The accuracy of a
    class without test examples is nan.
    """
    correct, total = np.broadcast_arrays(np.asarray(correct, dtype=np.float64), total)
    return np.divide(correct, total, out=np.full(correct.shape, np.nan), where=total > 0)


def overall_accuracy(correct: np.ndarray, total: np.ndarray) -> float:
    """Return the accuracy A = sum_c correct_c / sum_c total_c, or nan without test examples.

    correct, total: as in `class_accuracy`, [C]. A equals the mean of the class accuracies if the
    test set is balanced.
    """
    examples = np.sum(total)
    return float(np.sum(correct) / examples) if examples > 0 else float("nan")


def class_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the classes, [..., C] -> [...], ignoring nan (absent classes).

    The value is nan if all entries are nan.
    """
    values = np.asarray(values, dtype=np.float64)
    present = ~np.isnan(values)
    return class_accuracy(np.where(present, values, 0.0).sum(-1), present.sum(-1))
