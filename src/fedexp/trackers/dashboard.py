"""Build and save a W&B workspace for fedexp's runs (`fedexp dashboard`, extra `dashboard`)."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from fedexp.core.errors import ConfigError, reason_of
from fedexp.core.packages import import_extra
from fedexp.data.views import VIEWS, suffix
from fedexp.metrics.forgetting_metric import FORGETTING, ROUND_FORGETTING, round_quantities
from fedexp.metrics.quantity import ACCURACY, BEST_ACCURACY
from fedexp.trackers.names import target_name
from fedexp.trackers.wandb_tracker import end_service, is_logged_in, wandb_settings

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

# The default `target_fractions`.
TARGETS = tuple(target_name(f"{part}*best") for part in (0.75, 0.9, 1.0))
# Values of W&B's run summary.
RESULTS = (ACCURACY.key, BEST_ACCURACY.key, FORGETTING.key, ROUND_FORGETTING.key, *TARGETS)
PICTURES = (
    "class_accuracy",
    "class_accuracy_normalised",
    "local_round",
    "curves",
    "data_distribution",
    "tasks",
)
TABLES = ("table", "rounds_to_target")  # tables of a sweep


def workspace(project: str, name: str) -> "Workspace":
    """Build a workspace for a W&B project without saving it.

    project: the project in the form ENTITY/PROJECT. Raises ConfigError for any other form, or if
    wandb-workspaces is not installed.
    """
    entity, _, short = project.partition("/")
    if not entity or not short or "/" in short:
        raise ConfigError(f"{project}: must be ENTITY/PROJECT, such as team/fedexp")
    ws = import_extra("wandb_workspaces.workspaces", "dashboard", "fedexp dashboard")
    results = (f"summary:{name}" for name in RESULTS)
    return ws.Workspace(
        entity=entity,
        project=short,
        name=name,
        sections=sections(),
        settings=ws.WorkspaceSettings(x_axis="round", group_by_prefix="first", max_runs=50),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Metric("Group")],
            order=[ws.Ordering(ws.Summary("best_accuracy"), ascending=False)],
            pinned_columns=["run:displayName", "run:jobType", *results],
        ),
    )


def sections() -> "list[Section]":
    """Return the sections: results, one for each prefix of metric names, figures, and tables."""
    from wandb_workspaces.reports import v2 as wr
    from wandb_workspaces.workspaces import Section

    mean: Any = {"groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    curve: Any = partial(wr.LinePlot, x="round", **mean)
    panels: dict[str, list[Any]] = {"test": []}
    # Class names depend on the data set, so one panel shows all classes.
    for view in VIEWS:
        prefix = f"class{suffix(view)}"
        panels[prefix] = [curve(title="accuracy of each class", metric_regex=f"{prefix}/.*")]
    for metric in charted():
        panels.setdefault(metric.partition("/")[0], []).append(curve(title=metric, y=[metric]))
    panels["analysis"] = [curve(title="means over clients", metric_regex="analysis/.*")]
    bars: list[Any] = [wr.BarPlot(title=name, metrics=[name], **mean) for name in RESULTS]
    pictures: list[Any] = [
        wr.MediaBrowser(title=name, media_keys=[f"figures/{name}"], num_columns=2)
        for name in PICTURES
    ]
    tables: list[Any] = [wr.WeavePanelSummaryTable(table_name=f"tables/{name}") for name in TABLES]
    panels = {"results": bars, **panels, "figures": pictures, "tables": tables}
    is_open = ("results", "test", "forgetting", "figures")
    return [
        Section(name=name, panels=drawn, is_open=name in is_open) for name, drawn in panels.items()
    ]


def charted() -> Iterator[str]:
    """Yield the names of the values of a round that have a panel of their own."""
    for each in round_quantities():
        if each.main or not each.tracked.startswith("personal/"):
            yield each.tracked
            if each.validated:
                yield each.validated


def specification(made: "Workspace") -> dict[str, Any]:
    """Return the specification that is sent to W&B when the workspace is saved."""
    return made._model.model_dump(by_alias=True, exclude_none=True, mode="json")


def save(made: "Workspace") -> str:
    """Save the workspace and return its URL.

    Raises ConfigError if W&B has no API key or rejects the workspace.
    """
    try:
        if not is_logged_in(wandb_settings()):
            raise ConfigError("W&B has no API key; log in with `wandb login`, or use --print")
        return made.save().url
    except ConfigError:
        raise
    except Exception as error:  # raised for problems with the server, the account or the project
        raise ConfigError(f"W&B rejected the workspace ({reason_of(error)})") from error
    finally:
        end_service()  # wandb_settings() started the service
