"""Pieces of shards in a store, from the server that owns their blocks."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from benchmarks.range_server import State
from cli.server_process import command
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from disttrain.v1.peer_service_pb2 import FetchPiecesRequest, ObjectPieces
from disttrain.v1.peer_service_pb2_grpc import PeerServiceStub
from ports import free_addresses
from serving.harness import TIMEOUT_S, Running, index, job_data, receive, running
from shards import write_pairs
from stores import no_stores, stores

from dataserver.cli import main
from dataserver.dataset import Dataset
from dataserver.dataset.storage.blocks import Blocks
from dataserver.dataset.storage.client_interface import ObjectInfo
from dataserver.dataset.storage.pieces import BlockKey, Piece
from dataserver.dataset.storage.registry import remote_storage
from dataserver.dataset.storage.urls import Url
from dataserver.fleet.membership import Peers
from dataserver.fleet.peer import Peer
from dataserver.fleet.peer_health import PeerHealth
from dataserver.fleet.pieces import PieceFetcher
from dataserver.jobs import fill_job
from dataserver.security import Channels

__all__ = ["no_stores", "stores"]


@pytest.fixture
def owner(stores: tuple[State, str], tmp_path: Path) -> Iterator[tuple[Running, State, Path]]:
    """A server over a bucket."""
    folder = index(write_pairs(tmp_path / "local", 8, 4))
    stores[0].put_folder("/bucket/pairs", folder)
    assert main(["index", "s3://bucket/pairs", "--workers", "1"]) == 0
    with running({"pairs": Url("s3:/bucket/pairs")}) as server:
        yield server, stores[0], folder


class All(PieceFetcher):
    """One server owns everything."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(Peers((), bytes(16), Channels()))
        self.peer = peer

    def owner(self, key: BlockKey) -> Peer | None:  # noqa: ARG002
        return self.peer


def pieces_of(folder: Path) -> tuple[list[Piece], list[bytes]]:
    """All images, as pieces of the bucket, and their bytes on disk."""
    local = Dataset.open(folder)
    refs = [shard.image(row, 0) for shard in local.shards for row in range(shard.num_samples)]
    store = remote_storage(Url("s3:/bucket")).store(Url("s3:/bucket"))
    infos = {n: store.head(f"pairs/{shard.name}") for n, shard in enumerate(local.shards)}
    return [Piece(store, infos[ref.shard], ref.offset, ref.length) for ref in refs], [local.read(ref) for ref in refs]


def test_a_server_gives_pieces_to_another_one(owner: tuple[Running, State, Path]) -> None:
    server, _, folder = owner
    pieces, expected = pieces_of(folder)
    peer = Peer(server.address, PeerHealth(), Channels())
    peer.hear(peer.greet().result(timeout=30))
    asking = Blocks()
    asking.use_owners(All(peer))
    assert asking.read(pieces) == expected
    assert asking.counts.owner_bytes == sum(map(len, expected))
    assert asking.counts.store_requests == asking.held.used == 0
    peer.close()
    assert asking.read(pieces) == expected
    assert asking.counts.owner_failures == 1


def test_what_is_no_object_of_its_datasets_is_refused(owner: tuple[Running, State, Path]) -> None:
    server, state, folder = owner
    (piece, *_), _ = pieces_of(folder)
    digest = piece.blocks[0].object_digest
    stub = PeerServiceStub(server.channel)
    wrong = {
        grpc.StatusCode.NOT_FOUND: [ObjectPieces(object=bytes(32), start=[0], length=[1])],
        grpc.StatusCode.INVALID_ARGUMENT: [
            ObjectPieces(object=digest, start=[0, 1], length=[1]),
            ObjectPieces(object=digest, start=[0], length=[0]),
            ObjectPieces(object=digest, start=[1 << 40], length=[1]),
            ObjectPieces(object=digest, start=[0], length=[32 << 20]),
            ObjectPieces(object=digest, start=[0, 0], length=[1 << 30, 1 << 30]),
            ObjectPieces(object=digest, start=[0] * 70_000, length=[1] * 70_000),
        ],
    }
    before = len(state.ranges())
    for code, requests in wrong.items():
        for request in requests:
            with pytest.raises(grpc.RpcError) as caught:
                stub.FetchPieces(FetchPiecesRequest(objects=[request]), timeout=30)
            assert caught.value.code() is code
    with pytest.raises(grpc.RpcError):
        stub.FetchPieces(FetchPiecesRequest(), timeout=30)
    assert len(state.ranges()) == before


def test_another_version_is_another_object(owner: tuple[Running, State, Path]) -> None:
    server, _, folder = owner
    (piece, *_), _ = pieces_of(folder)
    other: ObjectInfo = piece.info._replace(version='"other"')
    digest = BlockKey(piece.source.name, other, 0).object_digest
    with pytest.raises(grpc.RpcError) as caught:
        PeerServiceStub(server.channel).FetchPieces(
            FetchPiecesRequest(objects=[ObjectPieces(object=digest, start=[0], length=[1])]), timeout=30
        )
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@contextmanager
def started(addresses: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Server processes of one fleet over the bucket, listening."""
    peers = ",".join(addresses)
    with ExitStack() as stack:
        processes = []
        for address in addresses:
            line = command("serve", "--listen", address, "--dataset", "pairs=s3://bucket/pairs", "--peers", peers)
            process = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("listening on ")
        yield processes


@pytest.mark.slow
def test_servers_of_a_fleet_read_a_bucket_together(stores: tuple[State, str], tmp_path: Path) -> None:
    """Two processes, and one is killed: the same bytes as from local disk."""
    folder = index(write_pairs(tmp_path / "local", 24, 8))
    stores[0].put_folder("/bucket/pairs", folder)
    assert main(["index", "s3://bucket/pairs", "--workers", "1"]) == 0
    data = job_data(datasets=[{"name": "pairs"}], end={"steps": 6})
    with running({"pairs": folder}) as local:
        text = json.dumps(fill_job(data, local.catalog))
        expected = local.read(local.create(data).job_id, "vit", 0).microbatches
    addresses = free_addresses(2)
    with started(addresses) as processes, grpc.insecure_channel(addresses[0]) as channel:
        stub = DataServiceStub(channel)
        job_id = stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=text), timeout=60).job_id
        stream = stub.StreamMicrobatches(
            pb.StreamMicrobatchesRequest(job_id=job_id, module="vit", rank=0), timeout=TIMEOUT_S
        )
        found = receive(stream, 1).microbatches
        processes[1].kill()
        found += receive(stream).microbatches
        assert [body for _, body in found] == [body for _, body in expected]
