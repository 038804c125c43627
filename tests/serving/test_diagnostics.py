"""What a server says of itself and its machine."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from disttrain.v1 import admin_service_pb2 as pb
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from serving.harness import TIMEOUT_S, index, running
from shards import write_pairs


def test_a_cache_disk_that_fails_has_no_known_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, caches = index(write_pairs(tmp_path / "d", 8, 8)), tmp_path / "caches"
    caches.mkdir()
    real_stat = os.stat

    def failing(path: Any, *more: Any, **options: Any) -> os.stat_result:
        if path == caches:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real_stat(path, *more, **options)

    with running({"d": pairs}, cache_dir=caches) as server:
        stub, request = AdminServiceStub(server.channel), pb.GetDiagnosticsRequest()
        assert stub.GetDiagnostics(request, timeout=TIMEOUT_S).cache_free_bytes > 0
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", failing)
            found = stub.GetDiagnostics(request, timeout=TIMEOUT_S)
        assert not found.HasField("cache_free_bytes")
        assert found.open_files > 0
