"""A saved W&B workspace for runs of fedexp (`fedexp dashboard`, extra `dashboard`)."""

from typing import TYPE_CHECKING, Any

from fedexp.core.errors import ConfigError
from fedexp.core.packages import how_to_install
from fedexp.core.views import VIEWS, suffix
from fedexp.trackers.wandb_names import target_name

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

CURVES = {  # section -> the metrics that it draws over rounds
    "test": ("test/accuracy", "test/loss", "test/average_accuracy", "test/new_task_accuracy"),
    "forgetting": (
        "forgetting/F",
        "forgetting/round",
        "forgetting/local_round",
        "forgetting/degree",
        "forgetting/task",
    ),
    "validation": ("validation/accuracy", "validation/loss"),
    "personal": ("personal/accuracy", "personal/accuracy_worst", "personal/forgetting"),
    "local": ("local/train_loss", "local/in_accuracy", "local/out_accuracy", "local/lr"),
    "time": ("time/round", "time/train", "time/evaluation", "time/samples_per_second"),
    "comm": ("comm/bytes_up", "comm/bytes_down"),
}
# All classes in one panel, since their names are the data set's; each view of the test set has a
# section.
CLASSES = tuple(f"class{suffix(view)}" for view in VIEWS)
# the default `target_fractions`
TARGETS = tuple(target_name(f"{part}*best") for part in (0.75, 0.9, 1.0))
# of the run's summary
RESULTS = ("accuracy", "best_accuracy", "forgetting", "round_forgetting", *TARGETS)
PICTURES = (
    "class_accuracy",
    "class_accuracy_normalised",
    "local_round",
    "curves",
    "data_distribution",
    "tasks",
)
SERVICE_SECONDS = 5.0  # for the end of wandb's background process
TABLES = ("table", "rounds_to_target")  # of a sweep


def workspace(project: str, name: str) -> "Workspace":
    """Raises ConfigError for what is no entity/project, or without the package."""
    entity, _, short = project.partition("/")
    if not entity or not short or "/" in short:
        raise ConfigError(f"{project}: must be ENTITY/PROJECT, such as team/fedexp")
    try:
        from wandb_workspaces import workspaces as ws
    except ImportError as error:
        raise ConfigError(
            f"needs the package wandb-workspaces: {how_to_install('dashboard')} ({error})"
        ) from None
    return ws.Workspace(
        entity=entity,
        project=short,
        name=name,
        sections=sections(),
        settings=ws.WorkspaceSettings(x_axis="round", group_by_prefix="first", max_runs=50),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Metric("Group")],
            order=[ws.Ordering(ws.Summary("best_accuracy"), ascending=False)],
            pinned_columns=[
                "run:displayName",
                "run:jobType",
                *(f"summary:{name}" for name in RESULTS),
            ],
        ),
    )


def sections() -> "list[Section]":
    """Results and pictures first, then one section for each prefix of the metrics."""
    from wandb_workspaces.reports import v2 as wr
    from wandb_workspaces.workspaces import Section

    def curve(*metrics: str, **options: Any) -> Any:
        return wr.LinePlot(
            x="round", y=[*metrics], groupby_aggfunc="mean", groupby_rangefunc="stddev", **options
        )

    def media(name: str) -> Any:
        return wr.MediaBrowser(title=name, media_keys=[f"figures/{name}"], num_columns=2)

    bars: list[Any] = [
        wr.BarPlot(title=name, metrics=[name], groupby_aggfunc="mean", groupby_rangefunc="stddev")
        for name in RESULTS
    ]
    drawn = {
        name: [curve(metric, title=metric) for metric in metrics]
        for name, metrics in CURVES.items()
    }
    drawn |= {
        name: [curve(title="accuracy of each class", metric_regex=f"{name}/.*")] for name in CLASSES
    }
    drawn["analysis"] = [curve(title="means over clients", metric_regex="analysis/.*")]
    names = ("test", *CLASSES, *(name for name in CURVES if name != "test"), "analysis")
    return [
        Section(name="results", panels=[*bars], is_open=True),
        *(
            Section(name=name, panels=drawn[name], is_open=name in ("test", "forgetting"))
            for name in names
        ),
        Section(name="figures", panels=[media(name) for name in PICTURES], is_open=True),
        Section(
            name="tables",
            panels=[wr.WeavePanelSummaryTable(table_name=f"tables/{name}") for name in TABLES],
        ),
    ]


def specification(made: "Workspace") -> dict[str, Any]:
    """Return the specification that W&B is sent."""
    return made._model.model_dump(by_alias=True, exclude_none=True, mode="json")


def save(made: "Workspace") -> str:
    """The address of the new view."""
    import wandb

    from fedexp.trackers.wandb_service import end_service, logged_in

    try:
        settings = wandb.setup().settings
        if not logged_in(settings.api_key, settings.base_url):
            raise ConfigError(
                "W&B has no key: log in first (`wandb login`), or see the specification with"
                " --print"
            )
        return made.save().url
    except ConfigError:
        raise
    except Exception as error:  # of many kinds: the server, the account, the project
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"W&B has not taken the workspace ({reason})") from error
    finally:
        end_service(SERVICE_SECONDS)  # which wandb.setup() has started
