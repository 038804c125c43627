"""What this server and its machine are set up like, for comparison with the rest of a fleet."""

import resource
import shutil
from hashlib import sha256
from pathlib import Path
from time import time_ns
from typing import Final

from disttrain.v1 import admin_service_pb2 as pb
from google.protobuf.timestamp_pb2 import Timestamp

from dataserver.dataset import BLOCKS
from dataserver.fleet.build import build_id
from dataserver.fleet.membership import Peers
from dataserver.security import certificates_in
from dataserver.serving.access import Access
from dataserver.serving.block_cache_config import needed_bytes
from dataserver.serving.tls import ServerTls

_UNLIMITED: Final = 1 << 63


class Diagnostics:
    """Takes the answer of GetDiagnostics."""

    def __init__(
        self, cache_dir: Path | None, windows: int, tls: ServerTls | None, access: Access, peers: Peers | None
    ) -> None:
        """Take what the answer is made from.

        Args:
            cache_dir: folder of caches.
            windows: bytes of shuffle windows that lie in stores; see `default_window_bytes`.
            tls: certificates in use.
            access: who is let in.
            peers: the other servers.
        """
        self._windows = windows
        self._cache_dir = cache_dir
        self._tls = tls
        self._access = access
        self._peers = peers

    def __call__(self) -> pb.GetDiagnosticsResponse:
        """Return what GetDiagnostics answers."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        live, known = (0, 0) if self._peers is None else self._peers.count()
        found = pb.GetDiagnosticsResponse(
            time=_at(time_ns()),
            build=build_id(),
            open_files=sum(1 for _ in Path("/proc/self/fd").iterdir()),
            max_open_files=_UNLIMITED if limit == resource.RLIM_INFINITY else limit,
            encrypted=self._tls is not None,
            authenticated=not self._access.is_open,
            cache_free_bytes=_free_bytes(self._cache_dir),
            known_peers=known,
            live_peers=live,
            unused_files=self._access.problems(),
        )
        if self._windows:
            found.block_bytes = BLOCKS.capacity
            found.wanted_block_bytes = needed_bytes(self._windows, 1 + known)
        authorities: list[bytes] = []
        if self._tls is not None:
            authorities = certificates_in(self._tls.client_authorities or b"")
            found.certificate_expiry.CopyFrom(_at(int(self._tls.expires * 1e9)))
            found.unused_files.extend([self._tls.problem] if self._tls.problem else [])
        if not self._access.is_open:
            found.access_digest = sha256(b"\n".join([self._access.in_use(), *authorities])).hexdigest()
        return found


def _free_bytes(folder: Path | None) -> int | None:
    """Room for a folder, which may be made later; None where it cannot be known."""
    if folder is None:
        return None
    try:
        there = next((above for above in (folder, *folder.parents) if above.exists()), None)
        return None if there is None else shutil.disk_usage(there).free
    except OSError:  # the disk is lost
        return None


def _at(ns: int) -> Timestamp:
    found = Timestamp()
    found.FromNanoseconds(ns)
    return found
