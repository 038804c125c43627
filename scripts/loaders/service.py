"""This service and its client, in processes of their own: `service.py SHARDS COUNT VIEWS`.

VIEWS is encoder or all; with `-sent` behind it the server shares no memory with the client, as on another machine, and
with `-grpc` it has no data port either. With `-tls` behind either of these everything is encrypted.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.data_connections import require_all_direct, require_none_left

from dataserver.allocator import cache_freed_memory
from dataserver.security import NO_CREDENTIALS, Credentials
from loaders.reporting import BATCH, report
from trainclient.client import DataClient

TRANSPORTS = {"": [], "sent": ["--no-shared-memory"], "grpc": ["--no-shared-memory", "--no-direct"]}
"""Flags of the server, by what stands behind the views."""
LOOKED_AT = 8
"""This microbatch is one of those before images are counted; how payloads come is looked at behind it."""
MODULE = "vision"
"""Whose view has the images."""


def serve_command(shards: Path | str) -> list[str]:
    """Starts a server on a free port, of shards in a folder or at a URL."""
    tool = str(Path(sys.executable).parent / "dataserver")
    return [tool, "serve", "--listen", "127.0.0.1:0", "--dataset", f"pairs={shards}"]


def with_tls(folder: Path) -> tuple[list[str], Credentials]:
    """Write a certificate for the loopback device; flags of the server, and what its clients need."""
    import trustme

    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    ca, chain, key = folder / "ca.pem", folder / "chain.pem", folder / "key.pem"
    authority.cert_pem.write_to_path(ca)
    chain.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    key.touch(0o600)
    pair.private_key_pem.write_to_path(key)
    return ["--tls-cert", str(chain), "--tls-key", str(key)], Credentials(tls_ca=ca)


def job_data(views: str) -> dict[str, Any]:
    """One rank of each module; without a generator, all images are understood."""
    modules = [{"name": MODULE, "kind": "encoder"}, {"name": "llm", "kind": "backbone"}]
    stream = {
        "datasets": [{"name": "pairs"}],
        "seq_len": 2048,
        "global_batch": 8 * BATCH,
        "packing": {"enabled": False},
    }
    if views == "all":
        modules.append({"name": "painter", "kind": "generator"})
        stream["generation"] = {"ratio": "0.3"}
    return {"stream": stream, "execution": {"modules": modules, "microbatch": BATCH, "end": {"steps": 100_000}}}


def batches(
    address: str, views: str, credentials: Credentials = NO_CREDENTIALS, *, sent: bool = False
) -> Iterator[int]:
    """Images of each microbatch, of all views, for ever.

    Args:
        address: of the server.
        views: encoder or all.
        credentials: for it.
        sent: whether payloads are to come over data connections.
    """
    wanted = {"encoder": (MODULE,), "all": (MODULE, "llm", "painter")}[views]
    with ExitStack() as stack:
        first = stack.enter_context(DataClient(address, job_data(views), wanted[0], 0, credentials=credentials))
        others = [
            stack.enter_context(DataClient(address, first.job.spec, name, 0, credentials=credentials))
            for name in wanted[1:]
        ]
        for number, microbatches in enumerate(zip(first, *others, strict=True)):
            require_none_left(first, *others)
            if sent and number == LOOKED_AT:
                require_all_direct(address, credentials)
            yield sum(len(m.tensors["grid"]) for m in microbatches if "grid" in m.tensors)


def main() -> None:
    """Start a server on a free port, and read from it."""
    cache_freed_memory()
    views, _, transport = sys.argv[3].partition("-")
    line = [*serve_command(Path(sys.argv[1])), *TRANSPORTS[transport.removesuffix("-tls")]]
    with tempfile.TemporaryDirectory() as folder:
        flags, credentials = with_tls(Path(folder)) if transport.endswith("-tls") else ([], NO_CREDENTIALS)
        server = subprocess.Popen([*line, *flags], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            sent = transport.startswith("sent")
            report(batches(address, views, credentials, sent=sent), int(sys.argv[2]))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
