"""All ranks of all modules of a job at once, each with a client of its own, as trainers read them."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

from cli.server_process import ServerProcess, serving
from serving.harness import index

from dataserver.dataset import Dataset
from dataserver.planning.job.identity import Job
from trainclient.client import Batch, DataClient
from trainclient.stream.endpoint import Timeouts

TIMEOUT_S = 60.0
View = tuple[str, int]
"""Module and rank."""
Clients = Mapping[View, DataClient]
Pauses = Mapping[int, Callable[[Clients], None]]


def dataset_flags(folders: Mapping[str, Path]) -> list[str]:
    """Flags of `dataserver serve`."""
    return [part for name, folder in folders.items() for part in ("--dataset", f"{name}={folder}")]


def start_servers(stack: ExitStack, flags: Sequence[str], count: int) -> dict[str, ServerProcess]:
    """Start that many server processes, which end with the stack; by address."""
    servers = [stack.enter_context(serving(*flags)) for _ in range(count)]
    return {server.address: server for server in servers}


def used_address(client: DataClient) -> str:
    """The server that a client's stream comes from."""
    return client.fleet.endpoints[client.fleet.current].address


@dataclass(frozen=True)
class Digest:
    """Everything of a microbatch that must be the same from every server; of each tensor a hash of its bytes."""

    position: tuple[str, int, int, int]
    plan_hash: bytes
    denominators: tuple[int, int]
    samples: tuple[tuple[int, int, int], ...]
    """Dataset, pass and number."""
    images: tuple[int, ...]
    validity: tuple[int, ...]
    sequence_valid: tuple[bool, ...]
    routings: tuple[tuple[object, ...], ...]
    tensors: tuple[tuple[str, str, tuple[int, ...], str], ...]


def digest(batch: Batch) -> Digest:
    """Sum a microbatch up."""
    items = batch.items
    return Digest(
        position=(batch.job_id, batch.step, batch.microbatch, batch.num_microbatches),
        plan_hash=batch.plan_hash,
        denominators=(batch.text_tokens, batch.target_patches),
        samples=tuple(zip(items.dataset.tolist(), items.epoch.tolist(), items.sample.tolist(), strict=True)),
        images=tuple(items.image.tolist()),
        validity=tuple(items.validity.tolist()),
        sequence_valid=tuple(batch.sequence_valid.tolist()),
        routings=tuple(
            tuple(v if isinstance(v, str) else v.tobytes() for v in astuple(routing)) for routing in batch.routings
        ),
        tensors=tuple(
            (name, str(t.dtype), tuple(t.shape), hashlib.sha256(t.numpy().tobytes()).hexdigest())
            for name, t in batch.tensors.items()
        ),
    )


def views_of(job: Job) -> list[View]:
    """All ranks of all modules."""
    return [(module.name, rank) for module in job.spec.execution.modules for rank in range(module.dp)]


def read_views(
    addresses: Sequence[str],
    job: Job,
    use: Callable[[Batch], Any],
    pauses: Pauses | None = None,
    timeouts: Timeouts = Timeouts(give_up=TIMEOUT_S),  # noqa: B008  it is frozen
) -> dict[View, list[Any]]:
    """Read all views to the end of the job, all at the same time.

    Args:
        addresses: the servers.
        job: a complete job.
        use: makes of a microbatch what is returned for it.
        pauses: for some steps, what to do when every rank has read the step's first microbatch and none the second.
        timeouts: of all clients.
    """
    views = views_of(job)
    with ExitStack() as stack:
        options: dict[str, Any] = {"prefetch_bytes": 0, "timeouts": timeouts}
        clients = {v: stack.enter_context(DataClient(addresses, job, *v, **options)) for v in views}
        barriers = {
            step: Barrier(len(views), lambda action=action: action(clients), TIMEOUT_S)
            for step, action in (pauses or {}).items()
        }

        def read(client: DataClient) -> Iterator[Any]:
            try:
                for batch in client:
                    yield use(batch)
                    if batch.microbatch == 0 and batch.step in barriers:
                        assert batch.num_microbatches > 1, "this step has no middle"
                        barriers[batch.step].wait()
            except BaseException:
                for barrier in barriers.values():
                    barrier.abort()
                raise

        with ThreadPoolExecutor(len(views)) as pool:
            found = {view: pool.submit(lambda client: list(read(client)), client) for view, client in clients.items()}
        return {view: future.result() for view, future in found.items()}


def break_image(source: Path, copy: Path, shard: int, row: int) -> Path:
    """Copy shards so that the image of one sample cannot be decoded (it must be a PNG), and index the copy."""
    image = Dataset.open(source).shards[shard].image(row, 0)
    copy.mkdir()
    for path in source.iterdir():
        if path.suffix in (".tar", ".parquet"):
            shutil.copy(path, copy)
    tar = copy / Dataset.open(source).shards[shard].name
    data = bytearray(tar.read_bytes())
    middle, end = image.offset + image.length // 2, image.offset + image.length
    data[middle:end] = bytes(255 - byte for byte in data[middle:end])
    tar.write_bytes(data)
    return index(copy)
