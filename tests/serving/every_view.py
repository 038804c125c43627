"""All that a server gives out of one small job."""

from collections.abc import Mapping
from typing import Any

from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2
from serving.harness import TIMEOUT_S, Running, tensors

from dataserver.dataset import Dataset
from dataserver.planning.stream.samples import ROW_BITS

STEPS = 2
Item = tuple[int, int, int, int]


class EveryView:
    """Every view of a job over one dataset, decoded, its plans, and what the server says of itself."""

    def __init__(self, server: Running, name: str, data: dict[str, Any], degrees: Mapping[str, int]) -> None:
        self.dataset: Dataset = server.catalog.datasets[name]
        job_id = server.create(data).job_id
        self.of = [
            (name, rank, header, tensors(header, body))
            for name, dp in degrees.items()
            for rank in range(dp)
            for header, body in server.read(job_id, name, rank).microbatches
        ]
        self.plans = [
            server.stub.GetPlan(pb.GetPlanRequest(job_id=job_id, step=step), timeout=TIMEOUT_S).plan
            for step in range(STEPS)
        ]
        self.info = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)

    def ref(self, item: Item) -> Any:
        shard, row = divmod(item[2], 1 << ROW_BITS)
        return self.dataset.shards[shard].image(row, item[3])


def items(header: microbatch_pb2.MicrobatchHeader) -> list[Item]:
    found = header.items
    return list(zip(found.dataset, found.epoch, found.sample, found.image, strict=True))
