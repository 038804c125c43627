"""Numbers of our own that others notice: a change of one is a decision, and belongs into CHANGELOG.md.

What is taken from others at most is in test_input_limits.py.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from trainclient.stream.endpoint import Timeouts, _channel_options

CLIENT = {
    "grpc.keepalive_time_ms": 2_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.http2.ping_timeout_ms": 5_000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.max_reconnect_backoff_ms": 2_000,
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.use_local_subchannel_pool": 1,
    "grpc.enable_retries": 0,
    "grpc.enable_http_proxy": 0,
}
ROOT = Path(__file__).parents[1]
MIB = 1 << 20

PLANS: dict[str, dict[str, Any]] = {
    "dataserver/planning/layouts/shared/alternatives.py": {"EXTRA_IN_FLIGHT": (0, 1, 2, 4)},
    "dataserver/planning/balancing/assignment.py": {"PAIRS_AT_ONCE": 1_048_576},
    "dataserver/planning/balancing/search.py": {"CLOSE": 16},
    "dataserver/planning/layouts/colocated/assignment.py": {"ROUNDS": 8},
    "dataserver/planning/layouts/colocated/rounds.py": {"_SHARE": 4_294_967_296},
    "dataserver/planning/fitting/fitting.py": {
        "UNITS": {"microbatch_ns": 1, "linear_ps": 1_000, "quadratic_fs": 1_000_000},
        "LEAST_SHARE_PPM": 10,
    },
    "dataserver/planning/fitting/outliers.py": {
        "LEAST_ROWS": 20,
        "LEAST_SIZES": 8,
        "MOST_SIZES": 256,
        "SIZE_BITS": 5,
        "GRID": 9,
        "FINALISTS": 5,
        "ROUNDS": 20,
        "FAR": 4,
        "NEAR_PPM": 1_000,
        "MILLION": 1_000_000,
    },
    "dataserver/planning/layouts/grouped/baselines.py": {"ITEMS_AT_ONCE": 256, "SPREAD_FROM": 16},
    "dataserver/planning/layouts/grouped/batch.py": {"UNLIMITED": 1_125_899_906_842_624},
    "dataserver/planning/layouts/grouped/policies.py": {
        "MAX_LOOKS": 15_000_000,
        "PLACING": 5_000,
        "_SAVINGS": (
            {"rounds": 1},
            {"cuts": 8},
            {"microbatch_counts": 2},
            {"cuts": 2},
            {"microbatch_counts": 1, "cuts": 0},
        ),
    },
    "dataserver/planning/layouts/grouped/refining.py": {"NUM_SEEDS": 2, "MAX_HALVINGS": 16},
    "dataserver/planning/layouts/grouped/wave_order.py": {"MAX_OPERATIONS": 500_000},
    "dataserver/planning/job/fields/plan_limits.py": {"SINGLE_STEP": 4},
    "dataserver/planning/kernels/grouping.py": {"NEVER": 4_611_686_018_427_387_904, "FIRST_LOOK": 8, "CLOSE": 9},
    "dataserver/planning/kernels/search.py": {"SLACK": 8},
    "dataserver/planning/stream/packing.py": {"_LOOKS_PER_SAMPLE": 16},
    "dataserver/planning/layouts/pipelined/layout.py": {"CHUNKS": 2},
    "dataserver/planning/layouts/pipelined/placing/search.py": {
        "SEARCH_OPERATIONS": 4_400,
        "RESERVED_OPERATIONS": 800_000,
        "GOAL_SHARE": 4_096,
        "FITTING_LOOKS": 32,
    },
    "dataserver/planning/stream/sizing.py": {"UNDERSTANDING_EXTRA": 2, "IMAGE_EXTRA": 2, "GENERATION_EXTRA": 2},
    "dataserver/planning/layouts/shared/waves.py": {"AUTOMATIC_EXTRA": 4},
}
"""What plan versions mean, and fits of costs, on which plans depend: servers of one fleet must plan alike."""
TIMES: dict[str, dict[str, float]] = {
    "dataserver/outputs.py": {"TEMP_LIFETIME_S": 86_400},
    "dataserver/dataset/stamps.py": {"TICK_S": 0.02},
    "dataserver/dataset/workers.py": {"LOOK_S": 0.25},
    "dataserver/planning/kernels/cache.py": {"_PATIENCE_S": 60, "_POLL_S": 0.05},
    "dataserver/serving/admin_service.py": {"MAX_GRACE_S": 3600, "DEFAULT_GRACE_S": 30},
    "dataserver/serving/assembly.py": {"READ_BACKOFF_S": 0.05},
    "dataserver/serving/metrics_endpoint.py": {"CONNECTION_S": 5, "_POLL_S": 0.5},
    "dataserver/serving/peers/fetching.py": {"FETCH_S": 10, "ASIDE_S": 30, "LOOK_S": 0.05},
    "dataserver/serving/peers/membership.py": {
        "LOOK_EVERY_S": 1,
        "RESOLVE_EVERY_S": 10,
        "PATIENCE_S": 15,
        "GREETINGS_PER_S": 5,
    },
    "dataserver/serving/peers/peer.py": {"GREET_S": 4, "BRING_S": 1800},
    "dataserver/serving/registry.py": {"PATIENCE_S": 5},
    "dataserver/serving/server.py": {"STOP_GRACE_S": 1},
    "dataserver/serving/stream.py": {"LOOK_S": 0.1},
    "trainclient/stream/endpoint.py": {"PING_EVERY_MS": 2000, "PING_TIMEOUT_MS": 5000},
    "trainclient/stream/shared_memory.py": {"SAY_EVERY_S": 0.2},
    "trainclient/stream/reader.py": {"JOIN_S": 10},
    "trainclient/stream/rotation.py": {"FIRST_PAUSE_S": 0.1, "LONGEST_PAUSE_S": 5, "REPORT_EVERY_S": 5},
}
"""How long something is waited for, and how often it is looked at; times a second where the name says so."""
KEPT: dict[str, dict[str, Any]] = {
    "dataserver/dataset/shard.py": {
        "SIZES_CACHE_BYTES": 64 * MIB,
        "TEXTS_CACHE_BYTES": 64 * MIB,
        "TOKEN_IDS_CACHE_BYTES": 32 * MIB,
        "TOKEN_COUNTS_CACHE_BYTES": 4 * MIB,
        "MAX_OPEN_TOKEN_IDS": 128,
    },
    "dataserver/jobs/cache.py": {"CACHE_BYTES": 768 * MIB, "CUTS_BYTES": 8 * MIB},
    "dataserver/jobs/tables.py": {"CACHED_SLICES": 4},
    "dataserver/planning/job/fields/problems.py": {"_MOST_SHOWN": 8, "_MOST_CHARS": 64},
    "dataserver/planning/kernels/peaks.py": {"LOOKS_AT_ONCE": 131_072},
    "dataserver/planning/kernels/packing.py": {"MOVES_AT_ONCE": 4_194_304},
    "dataserver/planning/layouts/pipelined/placing/search.py": {
        "OPERATIONS_AT_ONCE": 2_097_152,
        "LOOKS_AT_ONCE": 16_384,
    },
    "dataserver/images/limits.py": {"DECODER_BYTES_PER_PIXEL": 16},
    "dataserver/assembly/views.py": {"IMAGES_PER_TASK": 8, "READ_AT_ONCE_BYTES": 4 * MIB},
    "dataserver/serving/allocator.py": {
        "M_TRIM_THRESHOLD": -1,
        "M_TOP_PAD": -2,
        "M_MMAP_THRESHOLD": -3,
        "M_ARENA_MAX": -8,
        "CACHED_BYTES": 256 * MIB,
        "LARGEST_BYTES": 32 * MIB,
        "PADDING_BYTES": 64 * MIB,
        "ARENAS": 2,
    },
    "dataserver/serving/assembly.py": {"READ_ATTEMPTS": 4},
    "dataserver/serving/limits.py": {"MAX_TRANSPORT_BYTES": 8 * MIB},
    "dataserver/serving/memory.py": {"_SMALLEST_CLASS": 65_536, "_MAX_FREE_BUFFERS": 256},
    "dataserver/serving/peers/fetching.py": {"CHECK_ONE_IN": 64},
    "dataserver/serving/metrics.py": {
        "PLAN_BUCKETS_S": (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
        "JOB_CHARS": 12,
    },
    "dataserver/serving/peers/service.py": {"ANSWER_BYTES": 16 * MIB},
    "dataserver/serving/registry.py": {"REPORT_OVERHEAD_BYTES": 64, "JOBS_SHARE": 0.25},
    "dataserver/serving/server.py": {"UNARY_THREADS": 32, "WATCH_THREADS": 64, "PEER_THREADS": 256},
    "dataserver/serving/stream.py": {"MAX_AHEAD": 8, "AHEAD_BYTES": 8 * MIB},
    "dataserver/serving/shared_memory.py": {
        "MIN_SHARED_BYTES": 64 << 10,
        "MAX_SHARED": 20,
        "MAX_IDLE": 8,
        "MAX_BLOCKS": 512,
        "MAX_PENDING": 256,
    },
    "dataserver/serving/streams.py": {"VIEWS_AT_ONCE": 4},
    "dataserver/serving/budgets.py": {
        "PROCESS_BYTES": 128 * MIB,
        "DECODING_BYTES": 64 * MIB,
        "LEAST_JOB_BYTES": 64 * MIB,
        "PLENTY_BYTES": 1024 * MIB,
        "LEAST_SHARE": 5,
    },
    "trainclient/exchange/message_queue.py": {"MAX_UNTAKEN": 8},
    "trainclient/stream/buffers.py": {"MAPPED_BYTES": MIB, "SPARE_TAKES": 32},
    "trainclient/stream/shared_memory.py": {"MAX_BLOCKS": 256},
    "trainclient/stream/handoff.py": {"MAX_READY": 16},
    "trainclient/stream/reader.py": {"PREFETCH_BYTES": 128 * MIB},
    "trainclient/stream/receiver.py": {"MAX_WINDOW_BYTES": 128 * MIB},
}
"""Memory, threads and looks that are spent, and how finely things are told."""


def found(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    numbers = {}
    for path, expected in table.items():
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        numbers[path] = {name: getattr(module, name) for name in expected}
    return numbers


@pytest.mark.parametrize("table", [PLANS, TIMES, KEPT], ids=["plans", "times", "kept"])
def test_decided_numbers(table: dict[str, dict[str, Any]]) -> None:
    assert found(table) == table


def times_of(file: Path) -> set[str]:
    """The names of times that a module defines at its top."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id.endswith(("_S", "_MS")):
            value = getattr(node, "value", None)
            if isinstance(value, ast.Constant):
                names.add(target.id)
    return names


def test_every_time_is_among_them() -> None:
    folders = (
        "dataserver/dataset",
        "dataserver/planning",
        "dataserver/images",
        "dataserver/assembly",
        "dataserver/serving",
        "trainclient/stream",
    )
    files = {str(f.relative_to(ROOT)): times_of(f) for folder in folders for f in (ROOT / folder).rglob("*.py")}
    files["dataserver/outputs.py"] = times_of(ROOT / "dataserver/outputs.py")
    assert {path: names for path, names in files.items() if names} == {
        path: set(names) for path, names in TIMES.items()
    }


def test_options_of_a_client() -> None:
    options = dict(_channel_options(Timeouts(connect=1.5)))
    assert {name: options[name] for name in CLIENT} == CLIENT
    assert options["grpc.min_reconnect_backoff_ms"] == 1_500
    assert dict(_channel_options(Timeouts(connect=0.0001)))["grpc.min_reconnect_backoff_ms"] == 1


@pytest.mark.parametrize(
    ("module", "times"),
    [
        (
            "dataserver.serving.server",
            {
                "grpc.http2.min_ping_interval_without_data_ms": 1_000,
                "grpc.keepalive_permit_without_calls": 1,
                "grpc.keepalive_time_ms": 30_000,
                "grpc.keepalive_timeout_ms": 10_000,
                "grpc.http2.ping_timeout_ms": 10_000,
                "grpc.max_receive_message_length": 8 * MIB,
                "grpc.so_reuseport": 0,
            },
        ),
        (
            "dataserver.serving.peers.peer",
            {
                "grpc.max_receive_message_length": 32 * MIB,
                "grpc.keepalive_time_ms": 5_000,
                "grpc.keepalive_timeout_ms": 5_000,
                "grpc.http2.ping_timeout_ms": 5_000,
                "grpc.max_reconnect_backoff_ms": 2_000,
                "grpc.initial_reconnect_backoff_ms": 200,
                "grpc.use_local_subchannel_pool": 1,
                "grpc.enable_retries": 0,
                "grpc.enable_http_proxy": 0,
            },
        ),
    ],
)
def test_options_of_connections(module: str, times: dict[str, int]) -> None:
    """How soon either side notices that the other one is gone."""
    assert dict(importlib.import_module(module)._OPTIONS) == times
