"""Each alert fires on the numbers that it is about, and on them alone, as `promtool` evaluates the rules."""

import subprocess
from pathlib import Path

import pytest
import yaml
from deploy.manifests import ROOT
from deploy.prometheus_programs import programs
from monitoring.alerts import GROUPS

__all__ = ["programs"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
RANK = 'job_id="a",module="vit",rank="0"'
OTHER = 'job_id="a",module="vit",rank="1"'
LAST = 239
"""The last of the samples, which are half a minute from each other: two hours."""
HEALTHY = {
    "up": f"1x{LAST}",
    "disttrain_cores": f"8x{LAST}",
    f"disttrain_rank_waited_seconds_total{{{RANK}}}": f"0+1.5x{LAST}",
    f"disttrain_rank_unread_seconds{{{RANK}}}": f"200x{LAST}",
    f"disttrain_rank_step{{{RANK}}}": f"0+300x{LAST}",
    f"disttrain_rank_step{{{OTHER}}}": f"0+298x{LAST}",
    "process_start_time_seconds": "0x100 1x100",
    'disttrain_waited_seconds_total{stage="decoding"}': f"0+6x{LAST}",
    'disttrain_waited_seconds_total{stage="consumer"}': f"0+54x{LAST}",
    "disttrain_open_streams": f"2x{LAST}",
    "disttrain_max_streams": f"64x{LAST}",
    "process_open_fds": f"500x{LAST}",
    "process_max_fds": f"1000x{LAST}",
    'disttrain_plans_total{source="fetched"}': f"0+20x{LAST}",
    'disttrain_plans_total{source="late"}': f"0+1x{LAST}",
    'disttrain_cached_job_remakes_total{kind="plans"}': f"0+1x{LAST}",
    'disttrain_cached_job_remakes_total{kind="windows"}': f"5x{LAST}",
    'disttrain_cached_job_remakes_total{kind="tables"}': f"0+100x{LAST}",
    "disttrain_plan_seconds_count": f"0+20x{LAST}",
    "disttrain_direct_fallbacks_total": f"3x{LAST}",
    "disttrain_storage_errors_total": f"0+1x{LAST}",
    "disttrain_storage_retries_total": f"0+1x{LAST}",
    "disttrain_storage_failures_total": f"0x{LAST}",
    'disttrain_decoded_images_total{result="valid"}': f"0+999x{LAST}",
    'disttrain_decoded_images_total{result="invalid"}': f"0+1x{LAST}",
    "disttrain_store_bytes_total": f"0+110x{LAST}",
    "disttrain_read_bytes_total": f"0+100x{LAST}",
    "disttrain_certificate_expiry_timestamp_seconds": f"{30 * 86400}x{LAST}",
    "disttrain_refused_calls_total": f"0+1x{LAST}",
}
"""Series of one busy server; the clock begins in 1970."""
NEWS = f"3x{LAST - 10} 4x9"
"""A counter that grew once, five minutes ago."""
CASES: dict[str, dict[str, str]] = {
    "DistTrainTrainersWait": {f"disttrain_rank_waited_seconds_total{{{RANK}}}": f"0+6x{LAST}"},
    "DistTrainRankStopped": {f"disttrain_rank_unread_seconds{{{RANK}}}": f"0+30x{LAST}"},
    "DistTrainRanksDiverge": {f"disttrain_rank_step{{{OTHER}}}": f"9x{LAST}"},
    "DistTrainServerDown": {"up": f"1x{LAST - 20} 0x19", "disttrain_cores": f"8x{LAST - 20} _x19"},
    "DistTrainServerRestarts": {"process_start_time_seconds": "0x150 1x20 2x20 3x50"},
    "DistTrainServersTooSlow": {'disttrain_waited_seconds_total{stage="decoding"}': f"0+18x{LAST}"},
    "DistTrainStreamsNearLimit": {"disttrain_open_streams": f"60x{LAST}"},
    "DistTrainFilesNearLimit": {"process_open_fds": f"950x{LAST}"},
    "DistTrainPlansRepeated": {'disttrain_plans_total{source="late"}': f"0+10x{LAST}"},
    "DistTrainJobBytesTooSmall": {'disttrain_cached_job_remakes_total{kind="windows"}': f"0+5x{LAST}"},
    "DistTrainDataConnectionsFail": {"disttrain_direct_fallbacks_total": NEWS},
    "DistTrainStorageFails": {"disttrain_storage_failures_total": NEWS},
    "DistTrainStorageShaky": {
        "disttrain_storage_errors_total": f"0+30x{LAST}",
        "disttrain_storage_retries_total": f"0+30x{LAST}",
    },
    "DistTrainBadImages": {'disttrain_decoded_images_total{result="invalid"}': f"0+50x{LAST}"},
    "DistTrainCachesTooSmall": {"disttrain_store_bytes_total": f"0+200x{LAST}"},
    "DistTrainCertificateExpires": {"disttrain_certificate_expiry_timestamp_seconds": f"{10 * 86400}x{LAST}"},
    "DistTrainCallsRefused": {"disttrain_refused_calls_total": f"0+30x{LAST}"},
}
"""What differs from the healthy server."""


DOWN_LONG = {"up": f"1x{LAST - 180} 0x179", "disttrain_cores": f"8x{LAST - 180} _x179"}
"""For an hour and a half."""
GONE = {"up": f"1x{LAST - 180} _x179", "disttrain_cores": f"8x{LAST - 180} _x179"}
"""No target of Prometheus any more."""
RESTARTING = {"process_start_time_seconds": "0x150 1x20 2x20 3x28 _x19"}
"""And not up at this moment."""
SHAKY_AT_ONCE = {"disttrain_storage_errors_total": NEWS, "disttrain_storage_retries_total": f"3x{LAST - 9} 4x8"}
"""A read that failed was tried again, which one sample counts later."""
WAITS = CASES["DistTrainTrainersWait"]
"""At one server, while another one has a second stream of the same rank."""
IDLE = {f"disttrain_rank_waited_seconds_total{{{RANK}}}": f"0x{LAST}"}


def test_every_alert_has_a_case() -> None:
    assert {alert.name for group in GROUPS.values() for alert in group} == {*CASES, "DistTrainFleetDown"}


def series_of(server: str, values: dict[str, str]) -> list[dict[str, str]]:
    """Series of a server as promtool is given them."""
    found = []
    for series, numbers in values.items():
        name, _, labels = series.partition("{")
        target = f'job="data-servers",instance="{server}"'
        found.append({"series": f"{name}{{{target},{labels or '}'}".replace(",}", "}"), "values": numbers})
    return found


def case(servers: dict[str, dict[str, str]], firing: set[str]) -> dict[str, object]:
    """A test of promtool: what fires in the end, with series of servers that differ from a healthy one."""
    series = [one for name, changed in servers.items() for one in series_of(name, {**HEALTHY, **changed})]
    query = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "118m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)],
    }
    return {"interval": "30s", "input_series": series, "promql_expr_test": [query]}


def test_each_fires_alone(programs: dict[str, str], tmp_path: Path) -> None:
    """Beside a healthy server; and where no server is up, the fleet is down."""
    down = CASES["DistTrainServerDown"]
    cases = [
        case({"a": {}, "b": {}}, set()),
        *(case({"a": {}, "b": changed}, {name}) for name, changed in CASES.items()),
        case({"b": down}, {"DistTrainServerDown", "DistTrainFleetDown"}),
        case({"b": DOWN_LONG}, {"DistTrainServerDown", "DistTrainFleetDown"}),
        case({"b": GONE}, {"DistTrainFleetDown"}),
        case({"a": {}, "b": GONE}, set()),
        case({"b": {**RESTARTING, **down}}, {"DistTrainServerRestarts", "DistTrainServerDown", "DistTrainFleetDown"}),
        case({"b": SHAKY_AT_ONCE}, set()),
        case({"a": WAITS, "b": IDLE}, {"DistTrainTrainersWait"}),
    ]
    file = tmp_path / "cases.yaml"
    rules = str(ROOT / "deploy/prometheus/alerts.yaml")
    file.write_text(yaml.safe_dump({"rule_files": [rules], "evaluation_interval": "30s", "tests": cases}))
    done = subprocess.run(
        [programs["promtool"], "test", "rules", str(file)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
