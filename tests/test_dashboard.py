"""The W&B workspace shows the metrics under the names that the tracker logs."""

import json
import sys

import pytest

from fedexp.cli.main import main
from fedexp.trackers import dashboard
from fedexp.trackers.names import SUMMARIES, flat_summary
from wandb_runs import clean_home, make_fake_wandb  # noqa: F401 (fixtures)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces")
@pytest.mark.filterwarnings("ignore:Pydantic V1")
def test_print_flag_shows_the_specification(capsys):
    pytest.importorskip("wandb_workspaces")
    assert main(["dashboard", "team/project", "--print", "--name", "mine"]) == 0
    sent = json.loads(capsys.readouterr().out)
    assert (sent["entity"], sent["project"], sent["displayName"]) == ("team", "project", "mine")
    section = sent["spec"]["section"]
    sections = {each["name"]: each["panels"] for each in section["panelBankConfig"]["sections"]}
    prefixes = {name.partition("/")[0] for name in SUMMARIES} - {"figures"}
    assert set(sections) == {"results", "figures", "tables", *prefixes}
    for prefix in prefixes:
        for panel in sections[prefix]:
            config = panel["config"]
            assert panel["viewType"] == "Run History Line Plot"
            assert (config["xAxis"], config["groupAgg"], config["groupArea"]) == (
                "round",
                "mean",
                "stddev",
            )
            drawn = config["metrics"] or [config["metricRegex"]]
            assert all(metric.startswith(f"{prefix}/") for metric in drawn)
    assert [panel["config"]["metrics"] for panel in sections["results"]] == [
        [name] for name in dashboard.RESULTS
    ]
    media = [key for panel in sections["figures"] for key in panel["config"]["mediaKeys"]]
    assert {
        "figures/class_accuracy",
        "figures/class_accuracy_normalised",
        "figures/local_round",
    } <= set(media)
    (runs,) = section["runSets"]
    assert runs["grouping"] == [{"section": "run", "name": "group"}]
    assert section["settings"]["xAxis"] == "round"
    made = dashboard.workspace("team/project", "mine")
    model = made._model
    assert (
        type(made)._from_model(model)._model.spec.section.panel_bank_config
        == model.spec.section.panel_bank_config
    )


def test_panels_use_target_names_of_the_summary():
    summary = {"rounds_to_target": {f"{part}*best": 3 for part in (0.75, 0.9, 1.0)}}
    assert set(dashboard.TARGETS) == set(flat_summary(summary))


@pytest.mark.parametrize("project", ["fedexp", "a/b/c", "/fedexp", "team/"])
def test_invalid_project_is_rejected(project, capsys):
    assert main(["dashboard", project, "--print"]) == 2
    assert (
        capsys.readouterr().err
        == f"fedexp: {project}: must be ENTITY/PROJECT, such as team/fedexp\n"
    )


def test_dashboard_needs_wandb_workspaces(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert main(["dashboard", "team/project", "--print"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install -e '.[dashboard]'" in line
