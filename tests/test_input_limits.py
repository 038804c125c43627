"""How much is taken from others before it is refused. A number here is a decision: it changes what servers accept."""

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MIB = 1 << 20

LIMITS: dict[str, dict[str, int]] = {
    "dataserver/dataset/arrays.py": {"MAX_FILE_BYTES": 4096 * MIB, "MAX_ABOUT_BYTES": MIB},
    "dataserver/dataset/errors.py": {"MAX_ODDITY_BYTES": 4 * MIB, "MAX_DETAIL_CHARS": 200, "MAX_KEY_CHARS": 1024},
    "dataserver/dataset/files.py": {"MAX_SHARDS": 1_048_576},
    "dataserver/dataset/filters.py": {"MAX_FILTER_CHARS": 4096, "MAX_FILTER_DEPTH": 32},
    "dataserver/dataset/open_shards.py": {"MAX_OPEN_SHARDS": 128},
    "dataserver/dataset/parquet_columns.py": {
        "MAX_SIDECAR_BYTES": 1024 * MIB,
        "MAX_SIDECAR_ROWS": 4_194_304,
        "MAX_SIDECAR_VALUE_BYTES": 512 * MIB,
    },
    "dataserver/dataset/quarantine.py": {"MAX_QUARANTINE_BYTES": 256 * MIB},
    "dataserver/dataset/samples.py": {"MAX_TEXT_BYTES": 4 * MIB, "MAX_SAMPLE_MEMBERS": 4096, "MAX_SCALARS": 1024},
    "dataserver/dataset/scalar_rows.py": {"MAX_SCALAR_BYTES": 1024 * MIB},
    "dataserver/dataset/sidecar_columns.py": {"MAX_COLUMNS": 256, "MAX_COLUMN_NAME_CHARS": 128},
    "dataserver/dataset/tar.py": {
        "MAX_MEMBER_BYTES": 64 * MIB,
        "MAX_EXTENSION_BYTES": 65_536,
        "MAX_NAME_CHARS": 1024,
    },
    "dataserver/planning/balancing/interface.py": {"MAX_TOTAL": 2_305_843_009_213_693_952},
    "dataserver/planning/layouts/contrastive/limits.py": {"MAX_MICROBATCHES": 65_536},
    "dataserver/planning/fitting/fitting.py": {"MAX_TIME_NS": 1_000_000_000_000_000},
    "dataserver/planning/layouts/grouped/compositions.py": {"MAX_COMPOSITIONS": 50_000},
    "dataserver/planning/layouts/grouped/costs.py": {"MAX_TOKENS": 4_194_304},
    "dataserver/planning/job/fields/text.py": {"MAX_TEXT_BYTES": MIB, "MAX_NODES": 1_048_576, "MAX_DIGITS": 1000},
    "dataserver/planning/job/fields/transfers.py": {"MAX_BYTES_PER_NS": 1_000_000},
    "dataserver/planning/job/fields/values.py": {"MAX_INTEGER": 9_007_199_254_740_991},
    "dataserver/planning/stream/packing.py": {"MAX_SEQ_LEN": 1_073_741_824},
    "dataserver/images/limits.py": {
        "MAX_IMAGE_BYTES": 64 * MIB,
        "MAX_IMAGE_PIXELS": 134_217_728,
        "MAX_SCANNED_PIXELS": 2_147_483_648,
    },
    "dataserver/assembly/limits.py": {"MAX_TOKENIZER_BYTES": 256 * MIB, "MAX_TEXT_BATCH_BYTES": 16 * MIB},
    "dataserver/serving/admin_service.py": {"MAX_GRACE_S": 3600},
    "dataserver/serving/data_service.py": {
        "MAX_TENSOR_NAMES": 64,
        "MAX_TENSOR_NAME_CHARS": 64,
        "MAX_REPORT_BYTES": 65_536,
    },
    "dataserver/serving/descriptions.py": {"MAX_SAMPLES": 1024},
    "dataserver/serving/peers/membership.py": {"MAX_BUILD_CHARS": 64},
    "dataserver/serving/errors.py": {"MAX_TEXT_BYTES": 1500},
    "dataserver/serving/limits.py": {"MAX_MESSAGE_BYTES": 4 * MIB},
    "dataserver/serving/metrics_endpoint.py": {"MAX_CONNECTIONS": 16},
    "dataserver/serving/peers/fetching.py": {"MAX_REASON_CHARS": 400},
    "dataserver/serving/peers/peer_health.py": {"MAX_DISTRUSTED": 1024},
    "dataserver/serving/peers/peer.py": {"MAX_PLAN_BYTES": 32 * MIB},
    "dataserver/serving/peers/compact_message.py": {"MAX_TEXTS": 4096},
    "dataserver/serving/registry.py": {"MAX_STEP_TIMES": 1024, "MAX_STEP_TIMES_BYTES": 3 * MIB},
    "trainclient/stream/shared_memory.py": {"MAX_BLOCKS": 256},
    "trainclient/stream/microbatch.py": {
        "MAX_TENSORS": 64,
        "MAX_DIMENSIONS": 8,
        "MAX_ELEMENTS": 281_474_976_710_656,
    },
    "trainclient/stream/reader.py": {"MAX_MICROBATCH_BYTES": 4096 * MIB},
}
INSIDE = {
    "dataserver/planning/layouts/grouped/policies.py",
    "dataserver/planning/layouts/grouped/refining.py",
    "dataserver/planning/layouts/grouped/wave_order.py",
    "dataserver/dataset/shard.py",
    "dataserver/images/scratch.py",
    "dataserver/serving/shared_memory.py",
    "dataserver/serving/stream.py",
    "trainclient/stream/handoff.py",
    "trainclient/stream/receiver.py",
}
"""Bounds of work, caches and queues of our own."""
FOLDERS = (
    "dataserver/dataset",
    "dataserver/planning",
    "dataserver/images",
    "dataserver/assembly",
    "dataserver/serving",
    "trainclient/stream",
)


def limits(file: Path) -> set[str]:
    """The names of those that a module defines by numbers of its own."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id.startswith("MAX_"):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            if node.value and not any(isinstance(part, ast.Name) for part in ast.walk(node.value)):
                found.add(target.id)
    return found


def test_limits_of_what_is_taken_from_others() -> None:
    found = {}
    for path, expected in LIMITS.items():
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        found[path] = {name: getattr(module, name) for name in expected}
    assert found == LIMITS


def test_every_limit_is_among_them() -> None:
    files = {str(f.relative_to(ROOT)): limits(f) for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")}
    outside = {path: names for path, names in files.items() if names and path not in INSIDE}
    assert outside == {path: set(names) for path, names in LIMITS.items()}
    assert all(files[path] for path in INSIDE)
