"""The report of a search names the best value of each method."""

from fedexp.analysis.sweep import load_sweep
from fedexp.config.options import list_options
from fedexp.papers.aggregate import write_tables
from fedexp.rundir.sweeps import write_sweep_name
from test_compare import make_run
from toy_federation import CONFS

CIFAR = "experiment=fedka/cifar10"


def test_report_names_the_best_value_of_each_method(tmp_path):
    """FedKA has 50 and 60 % (mean 55) with beta 0.1, and 57 % with 0.01.

    With 0.5, it diverged at a higher accuracy. FedProx has one value.
    """
    for i, (beta, accuracy) in enumerate(
        [("0.1", 0.5), ("0.1", 0.6), ("0.01", 0.57), ("0.5", 0.9)]
    ):
        status = "diverged" if beta == "0.5" else "completed"
        overrides = [CIFAR, f"algorithm.beta={beta}", "algorithm=fedka", f"seed={i}"]
        make_run(tmp_path, overrides, [accuracy], status=status)
    make_run(tmp_path, [CIFAR, "algorithm.mu=1", "algorithm=fedprox"], [0.4])
    write_sweep_name(tmp_path, "fedka_search")
    write_tables(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "### Chosen values (highest accuracy in the last round, averaged over seeds)" in text
    assert "| FedKA | beta=0.01 | 57.00 |" in text
    assert "| FedProx | mu=1 | 40.00 |" in text


def test_only_one_sweep_is_a_search():
    found = [name for name in list_options("sweep", CONFS) if load_sweep(name, CONFS).choose]
    assert found == ["fedka_search"]
    assert not load_sweep("fedntd_fig15", CONFS).choose


def test_search_varies_one_key_in_one_setting():
    for block in load_sweep("fedka_search", CONFS).blocks:
        assert len(block.axes) == 2
        assert len([key for key in block.axes if "." in key]) == 1
