"""The dashboard and the alert rules are those of the code, and name what there is."""

import json
import re
from collections.abc import Iterator

import pytest
import yaml
from deploy.manifests import ROOT
from monitoring.alerts import GROUPS, RUNBOOKS
from monitoring.rendering import files

OPERATIONS = (ROOT / "docs/operations.md").read_text()
OF_PROCESSES = {"cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds", "start_time_seconds"}
"""What prometheus_client counts of a process, and queries use."""
OF_HISTOGRAMS = {"disttrain_plan_seconds_bucket", "disttrain_plan_seconds_count"}


def expressions() -> Iterator[str]:
    """All queries of the dashboard and the rules."""
    for panel in json.loads(files()["deploy/grafana/fleet.json"])["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for alerts in GROUPS.values():
        for alert in alerts:
            yield alert.expr


@pytest.mark.parametrize("name", files())
def test_files_are_those_that_the_code_writes(name: str) -> None:
    assert (ROOT / name).read_text() == files()[name], "run scripts/make_monitoring.py"


def test_queries_name_metrics_that_servers_have() -> None:
    listed = set(re.findall(r"`(disttrain_\w+)`", OPERATIONS.partition("## Alerts")[0]))
    used = set().union(*(re.findall(r"\b(?:disttrain|process)_\w+", expression) for expression in expressions()))
    assert len(used) > 20
    known = listed | {f"process_{name}" for name in OF_PROCESSES} | OF_HISTOGRAMS
    assert used - known == set()


def test_counters_are_looked_at_by_their_rate() -> None:
    for expression in expressions():
        for name in re.findall(r"\b(\w+_total)\b", expression):
            inside = rf"(rate|increase)\({name}(\{{[^}}]*\}})?\["
            assert re.search(inside, expression), expression


def test_every_alert_has_a_runbook() -> None:
    anchors = {heading.lower() for heading in re.findall(r"^#+ `?(DistTrain\w+)`?$", OPERATIONS, re.MULTILINE)}
    rules = [
        rule for group in yaml.safe_load(files()["deploy/prometheus/alerts.yaml"])["groups"] for rule in group["rules"]
    ]
    links = [rule["annotations"]["runbook_url"].removeprefix(f"{RUNBOOKS}#") for rule in rules]
    assert len(set(links)) == len(rules) > 10
    assert set(links) == anchors


def test_all_servers_are_not_all_processes_that_prometheus_knows() -> None:
    """Other targets have metrics of processes too."""
    choices = {one["name"]: one for one in json.loads(files()["deploy/grafana/fleet.json"])["templating"]["list"]}
    for name in ("job", "instance"):
        assert choices[name]["includeAll"]
        assert not choices[name].get("allValue")
        assert choices[name]["query"].startswith("label_values(disttrain_open_streams")


def test_panels_do_not_lie_on_each_other() -> None:
    panels = json.loads(files()["deploy/grafana/fleet.json"])["panels"]
    cells = [
        (x, y)
        for where in (panel["gridPos"] for panel in panels)
        for x in range(where["x"], where["x"] + where["w"])
        for y in range(where["y"], where["y"] + where["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    graphs = [panel for panel in panels if panel["type"] != "row"]
    assert len({panel["id"] for panel in graphs}) == len(graphs) > 30
    assert all(panel["description"] and panel["datasource"]["uid"] == "${datasource}" for panel in graphs)
