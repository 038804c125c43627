"""The files that Grafana and Prometheus read."""

import json
from collections.abc import Mapping
from typing import Final

import yaml
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

from monitoring.alerts import GROUPS, Alert
from monitoring.panels import ROWS, Panel

NOTICE: Final = "# written by scripts/make_monitoring.py; edit scripts/monitoring\n"
_SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
OF_OTHERS: Final = ("auto", "auto_count", "auto_min", "id")
"""Fields that the kit writes for every variable: of intervals, and an id that all would share. Grafana's schema has
none of them."""
_STAT_SPAN: Final = 4
_GRAPH_SPAN: Final = 8
"""Width of a graph, in columns out of 24."""


def files() -> Mapping[str, str]:
    """The text of each file by its path in the repository."""
    return {"deploy/grafana/fleet.json": dashboard(), "deploy/prometheus/alerts.yaml": rules()}


def dashboard() -> str:
    """The dashboard of a fleet as JSON."""
    built = (
        dashboards.Dashboard("DistTrain fleet")
        .uid("disttrain-fleet")
        .description("What trainers wait for, and what the data servers do about it.")
        .tags(["disttrain"])
        .time("now-3h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, label, series, every in (
        ("job", "Fleet", "disttrain_open_streams", None),
        ("instance", "Server", 'disttrain_open_streams{job=~"$job"}', None),
        ("job_id", "Job", 'disttrain_rank_ready_microbatches{job=~"$job"}', ".*"),
        ("module", "Module", 'disttrain_rank_ready_microbatches{job=~"$job", job_id=~"$job_id"}', ".*"),
    ):
        variable = (
            dashboards.QueryVariable(name)
            .label(label)
            .datasource(_SOURCE)
            .query(f"label_values({series}, {name})")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .current(models.VariableOption(selected=True, text="All", value="$__all"))
        )
        # Without a value of its own, "All" is all that the query lists: metrics of processes are not ours alone.
        built = built.with_variable(variable if every is None else variable.all_value(every))
    number = 0
    for row in ROWS:
        built = built.with_row(dashboards.Row(row.title))
        for panel in row.panels:
            number += 1
            built = built.with_panel(_graph(panel, number) if not panel.stat else _stat(panel, number))
    found = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    del found["style"]  # nor is it in the schema: visitors choose their theme
    for choice in found["templating"]["list"]:
        for field in OF_OTHERS:
            del choice[field]
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def rules() -> str:
    """The alert rules as Prometheus reads them."""
    groups = [
        {"name": f"disttrain-{name}", "rules": [_rule(alert) for alert in alerts]} for name, alerts in GROUPS.items()
    ]
    return NOTICE + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)


def _rule(alert: Alert) -> dict[str, object]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.for_,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook_url": alert.runbook},
    }


def _graph(panel: Panel, number: int) -> timeseries.Panel:
    stacking = common_builders.StackingConfig().mode(
        common.StackingMode.NORMAL if panel.stacked else common.StackingMode.NONE
    )
    built = (
        timeseries.Panel()
        .id(number)
        .title(panel.title)
        .description(panel.about)
        .unit(panel.unit)
        .min(0)
        .span(_GRAPH_SPAN)
        .height(8)
        .datasource(_SOURCE)
        .fill_opacity(30 if panel.stacked else 5)
        .stacking(stacking)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    return built.targets(_targets(panel))  # type: ignore[arg-type]  # a list of queries of one kind


def _stat(panel: Panel, number: int) -> stat.Panel:
    steps = [models.Threshold(value=None, color="green")]
    if panel.warn is not None:
        steps.append(models.Threshold(value=panel.warn, color="orange"))
    built = (
        stat.Panel()
        .id(number)
        .title(panel.title)
        .description(panel.about)
        .unit(panel.unit)
        .span(_STAT_SPAN)
        .height(4)
        .datasource(_SOURCE)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(dashboards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    )
    return built.targets(_targets(panel))  # type: ignore[arg-type]  # as above


def _targets(panel: Panel) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(query.expr).legend_format(query.legend).range()
        for number, query in enumerate(panel.queries)
    ]
