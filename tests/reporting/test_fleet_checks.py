"""What the doctor finds in a fleet, and that it finds nothing in one that is well."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from disttrain.v1 import admin_service_pb2 as admin
from disttrain.v1 import data_service_pb2 as data
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from dataserver.reporting.fleet_checks import CLOCK_S, EXPIRES_S, Finding, Seen, check, summary

NOW = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def healthy(address: str) -> Seen:
    return Seen(
        address,
        data.GetServerInfoResponse(
            release="1.0", content_digest="c" * 64, audio_digest="a" * 64, order_versions=[1], content_versions=[1],
            plan_versions=[4, 5], max_streams=64,
        ),
        data.GetDatasetInfoResponse(
            datasets=[data.DatasetInfo(name="laion", fingerprint="f" * 64)],
            tokenizers=[data.TokenizerInfo(name="llama", digest="d" * 64)],
        ),
        admin.GetMetricsResponse(open_streams=3, cached=admin.CachedBytes(jobs=10, windows=500 << 20, limit=1 << 30)),
        admin.GetDiagnosticsResponse(
            build="b" * 64, open_files=100, max_open_files=1 << 20, encrypted=True, authenticated=True,
            certificate_expiry=Timestamp(seconds=int(NOW + 2 * EXPIRES_S)), cache_free_bytes=1 << 40,
            known_peers=2, live_peers=2, access_digest="e" * 64, block_bytes=1 << 30, wanted_block_bytes=1 << 30,
        ),
        clock_s=0.4,
        doubt_s=0.1,
    )  # fmt: skip


def fleet(count: int = 3) -> list[Seen]:
    return [healthy(f"cpu{i}:50051") for i in range(count)]


def test_a_fleet_that_is_well() -> None:
    assert list(check(fleet(), NOW)) == []
    assert list(check([], NOW)) == []
    assert summary(fleet(), {"x:1": "silent"}) == "3 of 4 servers answer; release 1.0; datasets laion"
    assert summary([], {"x:1": "silent"}) == "0 of 1 servers answer"


def change(part: str, **fields: Any) -> Callable[[Seen], Seen]:
    def changed(one: Seen) -> Seen:
        if part == "clock":
            return Seen(one.address, one.info, one.datasets, one.metrics, one.diagnostics, **fields)
        message = getattr(one, part)
        for name, value in fields.items():
            if name.startswith("no_"):
                message.ClearField(name.removeprefix("no_"))
            elif isinstance(value, int | str | bool):
                setattr(message, name, value)
            elif isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                getattr(message, name).CopyFrom(value)
        return one

    return changed


@pytest.mark.parametrize(
    ("changed", "servers", "what"),
    [
        (change("info", release="0.9"), 2, "release 1.0, build bbbbbbbbbbbb"),
        (change("diagnostics", build="a" * 64), 2, "release 1.0, build bbbbbbbbbbbb"),
        (change("info", content_digest="0" * 64), 2, "content digest cccccccccccc"),
        (change("info", audio_digest="0" * 64), 2, "audio digest aaaaaaaaaaaa"),
        (change("datasets", no_datasets=None), 2, "dataset laion fingerprint ffffffffffff"),
        (change("datasets", no_tokenizers=None), 2, "tokenizer llama digest dddddddddddd"),
        (change("info", no_plan_versions=None), 3, "they have no plan_versions in common"),
        (change("info", draining=True), 1, "draining"),
        (change("clock", clock_s=-90.0, doubt_s=1.0), 1, "clock 90 s behind this machine's"),
        (change("diagnostics", encrypted=False), 1, "nothing is encrypted"),
        (change("diagnostics", authenticated=False), 1, "everybody is let in"),
        (change("diagnostics", certificate_expiry=Timestamp(seconds=int(NOW + 86400))), 1,
         "its certificate expires in 1.0 days, at 2026-01-02T00:00:00+00:00"),
        (change("diagnostics", unused_files=["the policy p cannot\nbe used"]), 1, "the policy p cannot\\nbe used"),
        (change("diagnostics", access_digest="0" * 64), 2, "access digest eeeeeeeeeeee"),
        (change("diagnostics", max_open_files=1023), 1,
         "it may open 1023 files; 1024 are wanted for 64 streams"),
        (change("diagnostics", open_files=1000, max_open_files=1024), 1, "1000 of 1024 files are open"),
        (change("metrics", open_streams=64), 1, "all 64 streams are open"),
        (change("metrics", cached=admin.CachedBytes(windows=1000 << 20, limit=1 << 30)), 1,
         "1000 of 1024 MiB for jobs are used, 1000 by shuffle windows"),
        (change("metrics", remade=admin.CachedCounts(plans=8, windows=3, tables=99)), 1,
         "11 plans and shuffle windows were made again soon after they were dropped, of 0 plans since its start; "
         "1024 MiB are for jobs"),
        (change("diagnostics", cache_free_bytes=5 << 20), 1, "5 MiB are left on the disk of --cache-dir"),
        (change("diagnostics", block_bytes=3 << 29, wanted_block_bytes=(2 << 30) - 1), 1,
         "its caches hold 1536 MiB of blocks from object stores; 2048 MiB are wanted for its part of the default "
         "shuffle window"),
        (change("diagnostics", live_peers=1), 1, "1 of 2 peers answer it"),
        (change("metrics", direct_fallbacks=3), 1, "3 streams left their data connection for gRPC, since its start"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("position", [0, 2])
def test_one_server_that_is_not_well(changed: Callable[[Seen], Seen], servers: int, what: str, position: int) -> None:
    """Where servers differ, both sides are named, the larger one first."""
    found = fleet()
    found[position] = changed(found[position])
    findings = list(check(found, NOW))
    assert (len(findings[0].servers), findings[0].what) == (servers, what)
    assert len(findings) == (2 if servers == 2 else 1)
    if servers != 3:
        assert findings[-1].servers == (f"cpu{position}:50051",)
    assert all(finding.remedy for finding in findings)


def test_a_full_cache_is_normal_where_little_is_made_again() -> None:
    (one,) = fleet(1)
    one.metrics.cached.CopyFrom(admin.CachedBytes(windows=1000 << 20, limit=1 << 30))
    one.metrics.remade.CopyFrom(admin.CachedCounts(plans=100, tables=5000))
    one.metrics.plan_times.add(plans=1000)
    assert list(check([one], NOW)) == []
    one.metrics.remade.windows = 1
    assert len(list(check([one], NOW))) == 1
    one.metrics.plans_by_source.fetched = 10
    assert list(check([one], NOW)) == []


def test_a_server_that_lets_everybody_in_lets_in_others() -> None:
    one, other = fleet(2)
    other.diagnostics.ClearField("access_digest")
    assert list(check([one, other], NOW)) == [], "an older release does not say"
    other.diagnostics.authenticated = False
    assert "access digest none" in [finding.what for finding in check([one, other], NOW)]


def test_what_is_wanted_is_not_mentioned() -> None:
    (one,) = fleet(1)
    one.diagnostics.ClearField("encrypted")
    one.diagnostics.ClearField("authenticated")
    assert len(list(check([one], NOW))) == 2
    assert list(check([one], NOW, insecure=True)) == []
    local = Seen("127.0.0.1:1", one.info, one.datasets, one.metrics, one.diagnostics, 0.0, 0.0)
    assert list(check([local], NOW)) == []


@given(st.floats(-1e6, 1e6), st.floats(0, 100))
def test_a_clock_is_judged_beyond_doubt_alone(clock_s: float, doubt_s: float) -> None:
    (one,) = fleet(1)
    found = list(check([change("clock", clock_s=clock_s, doubt_s=doubt_s)(one)], NOW))
    assert bool(found) == (abs(clock_s) > CLOCK_S + doubt_s)


def test_a_finding_is_two_lines() -> None:
    assert str(Finding(("a:1", "b:2"), "x", "y")) == "a:1, b:2: x\n    y"
