"""REPRODUCTION.md is current, and its statistics equal those of a second computation.

The second computation reads the committed files with lzma, json and csv, uses only numpy, and
shares no code with fedexp.papers or reproduction/.
"""

import csv
import itertools
import json
import lzma
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from reproduction import first_screen, statistics
from reproduction.__main__ import main
from reproduction.page import PAGE

from fedexp.papers import judge, readings

ROOT = Path(__file__).parents[1]
NAMES = {"fedavg": "FedAvg", "fedntd": "FedNTD", "fedprox": "FedProx", "scaffold": "SCAFFOLD"}
NAMES |= {"fednova": "FedNova", "moon": "MOON", "fedcurv": "FedCurv"}
T_49 = 2.0095752371292397  # 0.975 quantile of Student's t with 49 degrees of freedom
SPREAD = {"accuracy": 1.57, "forgetting": 0.016}
READINGS = {  # sweep -> label of its runs in the table
    "fedntd_table1_clients": "released clients",
    "fedntd_table1_tau3": "before the release",
    "fedntd_table1_clients_tau3": "released clients, before the release",
    "fedntd_table1_released": "released",
}


class Run:
    """A committed run, read by hand."""

    def __init__(self, path):
        run = json.loads(lzma.decompress(path.read_bytes()))
        given = dict(text.split("=", 1) for text in run["overrides"])
        data, setting = given["experiment"].removeprefix("fedntd/").split("_")
        self.name = path.name.removesuffix(".json.xz")
        self.column = (
            {"cifar10": "CIFAR-10", "mnist": "MNIST"}[data],
            f"alpha={setting[3:]}" if setting.startswith("lda") else f"s={setting[1:]}",
        )
        self.cell, self.seed = (*self.column, NAMES[given["algorithm"]]), int(given["seed"])
        self.old = not run["origin"].get("fingerprint")
        # FedCurv was corrected since the files without origin were made
        self.counts = not (self.old and given["algorithm"] == "fedcurv")
        self.values = {}
        for view, metric, column in [
            ("plain", "accuracy", "test_accuracy"),
            ("plain", "forgetting", "forgetting"),
            ("augmented", "accuracy", "test_accuracy_augmented"),
            ("augmented", "forgetting", "forgetting_augmented"),
        ]:
            if text := run["tables"]["rounds.csv"].get(column):
                values = [float(cell) for cell in text.split(",")[1:] if cell and cell != "nan"]
                self.values[view, metric] = np.array(values) * (100 if metric == "accuracy" else 1)


def committed(sweep):
    paths = sorted((ROOT / "multirun" / sweep / "runs").glob("*.json.xz"))
    return [run for run in map(Run, paths) if run.counts]


def printed():
    path = next(ROOT.glob("src/fedexp/*/published/tables.csv"))
    with path.open(encoding="utf-8") as file:
        return {
            (row["dataset"], row["partition_param"], row["method"], row["metric"]): (
                float(row["value"]),
                float(row["std"] or 0),
            )
            for row in csv.DictReader(file)
            if row["paper"] == "FedNTD" and row["table"] == "1" and row["value"]
        }


def last(values, metric):
    return values[-1]


def last_ten(values, metric):
    return values[-10:].sum() / 10


def average(values, metric):
    """0.4 (x_t + 0.6 x_{t-1} + ...) + 0.6^(t-1) x_1."""
    weights = 0.4 * 0.6 ** np.arange(len(values))[::-1]
    weights[0] /= 0.4
    return weights @ values


def best(values, metric):
    return values.max() if metric == "accuracy" else values.min()


RULES = {"last": last, "mean_of_last(10)": last_ten, "ema(0.6)": average, "best": best}


class Second:
    """The second computation: arrays over cells in a fixed order."""

    def __init__(self):
        self.runs = committed("fedntd_table1")
        self.prints = printed()
        both = [run for run in self.runs if ("augmented", "accuracy") in run.values]
        self.cells = sorted({run.cell for run in both})
        self.of = {cell: [run for run in both if run.cell == cell] for cell in self.cells}
        self.columns = sorted({cell[:2] for cell in self.cells})

    def value(self, cell, metric, view="augmented", rule=average):
        return np.mean([rule(run.values[view, metric], metric) for run in self.of[cell]])

    def ours(self, metric, view="augmented", rule=average):
        return np.array([self.value(cell, metric, view, rule) for cell in self.cells])

    def print(self, metric):
        return np.array([self.prints[(*cell, metric)][0] for cell in self.cells])

    def far(self, metric, view="augmented", rule=average):
        return self.ours(metric, view, rule) - self.print(metric)

    def tolerance(self, cell, metric):
        least = 2.0 if metric == "accuracy" else 0.05
        seeds = len(self.of[cell])
        return max(least, 2 * self.prints[(*cell, metric)][1], 2 * SPREAD[metric] / seeds**0.5)

    def held(self):
        seen = ("s=2", "alpha=0.1")
        return np.array([cell[0] == "CIFAR-10" and cell[1] not in seen for cell in self.cells])


@pytest.fixture(scope="module")
def second():
    return Second()


class First:
    """The computation of the page, from all committed runs."""

    def __init__(self):
        self.everything = sweeps, self.all_runs, self.tables = readings.compare_everything(ROOT)
        self.sweep = sweeps[statistics.SWEEP]
        self.every = statistics.select_runs(self.sweep, self.all_runs)
        self.runs = statistics.select_both_views(self.every)
        self.table = statistics.cells(self.sweep, self.runs)
        self.ours = statistics.select(self.table)


@pytest.fixture(scope="module")
def first():
    return First()


def of(table, metric):
    return table[table["metric"] == metric]


METRICS = pytest.mark.parametrize("metric", ["accuracy", "forgetting"])


@METRICS
@pytest.mark.parametrize("view", ["plain", "augmented"])
@pytest.mark.parametrize("rule", RULES)
def test_errors_of_each_view_and_rule_equal_independent_computation(
    first, second, metric, view, rule
):
    far, held = second.far(metric, view, RULES[rule]), second.held()
    data = np.array([cell[0] for cell in second.cells])
    limit = 2 if metric == "accuracy" else 0.05
    table = first.table
    everything = [(far, table), (far[held], table[statistics.is_held_out(table)])]
    everything += [(far[data == name], table[table["dataset"] == name]) for name in set(data)]
    for mine, rows in everything:
        found = statistics.errors(rows, ["metric", "view", "rule"]).loc[(metric, view, rule)]
        assert found["n"] == len(mine)
        assert found["rmse"] == pytest.approx((mine @ mine / len(mine)) ** 0.5)
        assert found["bias"] == pytest.approx(mine.sum() / len(mine))
        assert found["within"] == sum(abs(each) <= limit for each in mine)


@METRICS
def test_counts_of_the_nearer_view_and_rule_equal_independent_computation(first, second, metric):
    rule, others = ("augmented", "ema(0.6)"), [("plain", "ema(0.6)"), ("augmented", "best")]
    for other in [*others, ("augmented", "mean_of_last(10)")]:
        one, two = (abs(second.far(metric, view, RULES[name])) for view, name in (rule, other))
        assert statistics.nearer(first.table, rule, other)[metric] == sum(one < two)


@METRICS
def test_gains_over_fedavg_equal_independent_computation(first, second, metric):
    mine = []
    for cell in second.cells:
        base = (*cell[:2], "FedAvg")
        if cell != base:
            prints = [second.prints[(*each, metric)][0] for each in (cell, base)]
            values = [second.value(each, metric) for each in (cell, base)]
            mine.append((values[0] - values[1], prints[0] - prints[1]))
    x, y = np.array(mine).T
    r = ((x - x.mean()) @ (y - y.mean())) / len(x) / x.std() / y.std()
    found = first_screen.compare_gains(of(first.ours, metric))
    assert found["n"] == len(mine)
    assert found["correlation"] == pytest.approx(r)
    assert found["sign"] == sum(a * b > 0 for a, b in mine)


def test_values_within_tolerance_by_chance_equal_independent_computation(first, second):
    """A permutation of n methods gives each method each published value with probability 1/n, so
    the mean of the counts is known exactly. The quantiles use another generator."""
    own, others, pairs, mean = 0, 0, 0, 0.0
    random, totals = np.random.RandomState(1), np.zeros(2000)
    for column in second.columns:
        methods = [cell for cell in second.cells if cell[:2] == column]
        hit = np.zeros((len(methods), len(methods)))
        for (i, one), (j, other) in itertools.product(enumerate(methods), repeat=2):
            for metric in SPREAD:
                far = second.value(one, metric) - second.prints[(*other, metric)][0]
                hit[i, j] += abs(far) <= second.tolerance(one, metric)
                pairs += i != j
        own += sum(hit[i, i] for i in range(len(methods)))
        others += hit.sum() - sum(hit[i, i] for i in range(len(methods)))
        mean += hit.sum() / len(methods)
        for draw in range(len(totals)):
            totals[draw] += hit[range(len(methods)), random.permutation(len(methods))].sum()
    found = statistics.chance(first.ours)
    assert (found["within"], found["of"]) == (own, 2 * len(second.cells))
    assert found["share"] == pytest.approx(others / pairs)
    permuted = found["permuted"]
    assert permuted[0] == pytest.approx(mean, abs=0.3)
    assert permuted[1:] == pytest.approx(np.percentile(totals, [2.5, 97.5]), abs=1)
    assert found["most"] < own


def test_pairs_of_methods_equal_independent_computation(first, second):
    decidable, swapped, count = set(), set(), 0
    for column in {run.column for run in second.runs}:
        mine = sorted((run for run in second.runs if run.column == column), key=lambda r: r.old)
        methods = {run.cell for run in mine}
        tested = {run.cell for run in mine if ("augmented", "accuracy") in run.values}
        view = "augmented" if tested == methods else "plain"
        for one, other in itertools.combinations(sorted(methods), 2):
            for metric in SPREAD:
                count += 1
                a, b = (
                    next(
                        run.values[view, metric]
                        for run in mine
                        if run.cell == cell and run.seed == 0 and (view, metric) in run.values
                    )
                    for cell in (one, other)
                )
                rest = (a - b)[-50:]
                error = np.sqrt(((rest - rest.mean()) ** 2).sum() / 49) / 2
                far = second.prints[(*one, metric)][0] - second.prints[(*other, metric)][0]
                name = (*column, metric, *sorted((one[2], other[2])))
                if abs(average(a - b, metric)) > T_49 * error and round(far, 6):
                    decidable.add(name)
                    if average(a - b, metric) * far < 0:
                        swapped.add(name)
    found = statistics.method_pairs(first.every)
    keys = [
        (*row[:3], *sorted(row[3:]))
        for row in found[["dataset", "partition_param", "metric", "method", "other"]].to_numpy()
    ]
    assert len(keys) == len(set(keys)) == count
    assert {key for key, yes in zip(keys, found["decidable"], strict=True) if yes} == decidable
    assert {key for key, yes in zip(keys, found["swapped"], strict=True) if yes} == swapped


@METRICS
def test_other_explanations_equal_independent_computation(first, second, metric):
    x, y = second.ours(metric, "plain", last_ten), second.print(metric)
    rounds = len(next(iter(second.of.values()))[0].values["plain", metric])
    curves = np.array(
        [
            [second.value(cell, metric, "plain", lambda v, _, t=t: average(v[:t], _)) for t in ends]
            for cell in second.cells
            for ends in [range(1, rounds + 1)]
        ]
    )
    far = {name: [] for name in ("one factor", "affine", "stopping early")}
    for column in second.columns:
        out = np.array([cell[:2] == column for cell in second.cells])
        u, v = x[~out], y[~out]
        far["one factor"] += [*(np.mean(v / u) * x[out] - y[out])]
        slope = ((u - u.mean()) @ (v - v.mean())) / ((u - u.mean()) @ (u - u.mean()))
        far["affine"] += [*(v.mean() + slope * (x[out] - u.mean()) - y[out])]
        stop = np.argmin([((curve - v) ** 2).sum() for curve in curves[~out].T])
        far["stopping early"] += [*(curves[out][:, stop] - y[out])]
    found = statistics.rivals(first.runs, first.table)[metric]
    for name, values in far.items():
        assert found[name] == pytest.approx(np.sqrt(np.mean(np.square(values)))), name


@METRICS
def test_bootstrap_interval_is_close_to_that_of_another_generator(first, second, metric):
    """Another generator gives the same ends within a tenth of the interval."""
    far, random = second.far(metric), np.random.RandomState(7)
    groups = [far[[cell[:2] == column for cell in second.cells]] ** 2 for column in second.columns]
    found = []
    for _ in range(5000):
        drawn = np.concatenate([groups[i] for i in random.randint(len(groups), size=len(groups))])
        found.append(drawn.mean() ** 0.5)
    low, high = np.percentile(found, [2.5, 97.5])
    ends = statistics.interval(of(first.ours, metric), statistics.rmse)
    assert ends == pytest.approx((low, high), abs=0.1 * (high - low))


@METRICS
def test_spread_over_seeds_equals_independent_computation(first, second, metric):
    squares, freedom = 0.0, 0
    for each in second.of.values():
        values = np.array([average(run.values["augmented", metric], metric) for run in each])
        squares += ((values - values.mean()) ** 2).sum()
        freedom += len(values) - 1
    found = statistics.seed_spread(first.runs).loc[metric]
    assert found["freedom"] == freedom
    assert found["spread"] == pytest.approx((squares / freedom) ** 0.5)
    assert found["low"] < found["spread"] < found["high"]


def test_interval_of_a_spread_equals_hand_calculation():
    """Two seeds with 1 and 3: variance 2 with one degree of freedom. The 0.025 and 0.975 quantiles
    of chi-square with one are 0.000982069 and 5.023886, so sigma is in sqrt(2 / 5.023886) = 0.63096
    to sqrt(2 / 0.000982069) = 45.1277."""
    cell = {"dataset": "D", "partition_param": "s", "method": "M", "metric": "accuracy"}
    rows = [{**cell, "view": "augmented", "values": np.array([value])} for value in (1.0, 3.0)]
    found = statistics.seed_spread(pd.DataFrame(rows)).loc["accuracy"]
    assert found["spread"] == pytest.approx(2**0.5)
    assert found[["low", "high"]].tolist() == pytest.approx([0.63096, 45.1277], rel=1e-4)


def test_fluctuations_of_methods_and_sums_equal_independent_computation(first, second):
    def straightened(values):
        rounds = np.stack([np.ones(50), np.arange(50)], axis=1)
        return values - rounds @ np.linalg.solve(rounds.T @ rounds, rounds.T @ values)

    found = []
    for one, other in itertools.combinations(second.cells, 2):
        if one[:2] == other[:2]:
            a, b = (
                straightened(second.of[cell][0].values["augmented", "accuracy"][-50:])
                for cell in (one, other)
            )
            found.append(a @ b / np.sqrt((a @ a) * (b @ b)))
    assert statistics.correlate_swings(first.runs) == pytest.approx(np.mean(found))
    ratios = {"CIFAR-10": [], "MNIST": []}
    for run in itertools.chain(*second.of.values()):
        accuracy = run.values["augmented", "accuracy"][-50:] / 100
        both = accuracy + run.values["augmented", "forgetting"][-50:]
        ratios[run.cell[0]].append(both.std() / accuracy.std())
    for name, ratio in statistics.swing_of_sum(first.runs).items():
        assert ratio == pytest.approx(np.mean(ratios[name]))


def test_sums_of_accuracy_and_forgetting_equal_independent_computation(first, second):
    found = statistics.sums(first.ours)
    for cell in second.cells:
        value = second.value(cell, "accuracy") / 100 + second.value(cell, "forgetting")
        assert found.loc[cell, "value"] == pytest.approx(value)


def test_values_of_other_readings_equal_independent_computation(first, second):
    found, limits = {}, {"accuracy": 2, "forgetting": 0.05}
    for sweep, name in READINGS.items():
        for run in committed(sweep):
            for metric, limit in limits.items():
                print_ = second.prints[(*run.cell, metric)][0]
                was = abs(second.value(run.cell, metric) - print_) <= limit
                now = abs(average(run.values["augmented", metric], metric) - print_) <= limit
                found[(name, *run.cell, metric)] = (was, now)
    rows = statistics.other_readings(first.tables[statistics.SWEEP])
    keys = rows[["reading", *statistics.CELL, "metric"]].itertuples(index=False, name=None)
    assert dict(zip(keys, zip(rows["was"], rows["now"], strict=True), strict=True)) == found


def test_order_of_methods_on_other_data_equals_hand_calculation():
    """By hand: three methods have the published values 3, 2, 1. Ours are 10, 12, 5 with errors 0.5,
    0.6, 1: distances 2, 5 and 7 against two standard errors 1.562, 2.236 and 2.332, so all pairs
    are decidable and the first is swapped. Ranks 2, 3, 1 against 3, 2, 1: rho = 1 - 6 (1 + 1 + 0) /
    24 = 0.5. Rows that were not run and rows of other readings do not count."""
    rows = {
        "setting": "column",
        "reading": ["", "", "", "", "other"],
        "n": [1, 2, 1, 0, 1],
        "mean": [10, 12, 5, np.nan, 1],
        "error": [0.5, 0.6, 1, np.nan, 0.1],
        "printed": [3, 2, 1, 9, 9],
    }
    (found,) = statistics.orders_on_other_data(pd.DataFrame(rows)).to_dict("records")
    assert found.pop("rho") == pytest.approx(0.5)
    assert found == {"setting": "column", "n": 3, "pairs": 3, "decidable": 3, "swapped": 1}


def test_share_of_matches_by_chance_equals_hand_calculation():
    """By hand: values 10, 12, 20 with the published 11, 13, 30 and tolerances 1, 2, 5. Value 1 is
    within 1 of 11 only; value 2 is within 2 of 11 and 13; value 3 of none. One of six pairs of
    different methods matches. A column with one method has no pairs."""
    rows = dict.fromkeys(judge.COLUMN, "") | {
        "metric": ["a", "a", "a", "b"],
        "mean": [10, 12, 20, 1],
        "printed": [11, 13, 30, 1],
        "tolerance": [1, 2, 5, 1],
    }
    assert statistics.share_by_chance(pd.DataFrame(rows)) == pytest.approx(1 / 6)


def test_committed_page_is_current(first, monkeypatch, capsys):
    monkeypatch.setattr(readings, "compare_everything", lambda root: first.everything)
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_page_has_the_numbers_of_the_independent_computation(second):
    first_part = (ROOT / PAGE).read_text(encoding="utf-8").partition("## Measured tables")[0]
    text = " ".join(first_part.split())
    accuracy, forgetting = (
        np.sqrt(np.mean(second.far(metric) ** 2)) for metric in ("accuracy", "forgetting")
    )
    held = np.sqrt(np.mean(second.far("accuracy")[second.held()] ** 2))
    far = [
        abs(second.value(cell, metric) - second.prints[(*cell, metric)][0])
        > second.tolerance(cell, metric)
        for cell in second.cells
        for metric in SPREAD
    ]
    assert f"We ran {len(second.cells)} cells in {len(second.columns)} columns" in text
    assert f"accuracies have an RMSE of {accuracy:.2f} points [" in text
    assert f"The RMSE of F is {forgetting:.3f} [" in text
    assert f"Their RMSE is {held:.2f} points" in text
    assert f"{len(far) - sum(far)} of {len(far)} values are within the tolerance" in text
    listed = text.count(", published ") - text.count(", published +") - text.count(", published -")
    assert listed >= sum(far)


def test_counts_of_seeds_and_readings_equal_independent_computation(first, second):
    """Second seeds, other readings together, FedNTD's F, and the run in two precisions."""
    limits = {"accuracy": 2, "forgetting": 0.05}
    several = [cell for cell in second.cells if len({run.seed for run in second.of[cell]}) > 1]
    outside = 0
    for cell in several:
        (lowest,) = (run for run in second.of[cell] if run.seed == 0)
        outside += any(
            abs(average(lowest.values["augmented", m], m) - second.prints[(*cell, m)][0])
            > limits[m]
            for m in limits
        )
    assert first_screen.count_second_seeds(first.sweep, first.runs) == {
        "n": len(several),
        "outside": outside,
    }

    *rows, together = first_screen.count_tried_readings(first.tables[statistics.SWEEP])
    for name in ("failures", "fixed", "controls", "broken"):
        assert together[name] == sum(row[name] for row in rows)
    values = 2 * sum(len(committed(name)) for name in READINGS)
    assert together["failures"] + together["controls"] == values

    cifar = [cell for cell in second.cells if cell[0] == "CIFAR-10"]
    far = dict(zip(second.cells, second.far("forgetting"), strict=True))
    mine = [cell for cell in cifar if cell[2] == "FedNTD"]
    rest = [np.mean([far[c] for c in cifar if c[:2] == cell[:2] and c != cell]) for cell in mine]
    found = first_screen.compare_forgetting_of_fedntd(first.ours)
    assert (found["n"], found["low"]) == (len(mine), sum(far[cell] < 0 for cell in mine))
    assert found["bias"] == pytest.approx(np.mean([far[cell] for cell in mine]))
    relative = np.mean([far[cell] for cell in mine]) - np.mean(rest)
    assert found["relative"] == pytest.approx(relative)

    with (ROOT / first_screen.IN_BF16).open(encoding="utf-8") as file:
        low = [100 * float(row["test_accuracy_augmented"]) for row in csv.DictReader(file)][-50:]
    (high,) = (run for run in second.runs if run.name == first_screen.IN_TWO_PRECISIONS)
    line = np.stack([np.ones(50), np.arange(50)], axis=1)
    both = np.stack([high.values["augmented", "accuracy"][-50:], low], axis=1)
    both = both - line @ np.linalg.lstsq(line, both, rcond=None)[0]
    r = both[:, 0] @ both[:, 1] / np.sqrt((both[:, 0] @ both[:, 0]) * (both[:, 1] @ both[:, 1]))
    assert first_screen.correlate_precisions(ROOT, first.runs) == pytest.approx(r)
