"""How many images a second one process hands out at most.

The images are tiny, so that decoding takes hardly any time, and what is left is the work of the interpreter on each:
reading, gathering, entries of headers. That work holds the interpreter's lock, so one process hands out at most as many
images a second as go into a second of it, whatever the number of cores; CPU time is measured, so that other work on the
machine does not count.
"""

import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from demo_parts.processes import Processes
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from PIL import Image

from benchmarks.rows import Row, spread

SERVER: Final = sys.executable, "-m", "dataserver"
STREAM: Final = "/disttrain.v1.DataService/StreamMicrobatches"
TIMEOUT_S: Final = 600.0
RANKS: Final = 8
STEP_IMAGES: Final = 1024
Data = dict[str, Any]


def write_shards(folder: Path, shards: int, samples: int) -> None:
    """Shards of captioned images of 28 x 28 pixels."""
    folder.mkdir()
    buffer = io.BytesIO()
    Image.new("RGB", (28, 28), (10, 200, 90)).save(buffer, "JPEG")
    for shard in range(shards):
        members = (("jpg", buffer.getvalue()), ("txt", b"a photo of shard %d" % shard))
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for sample in range(samples):
                for extension, content in members:
                    info = tarfile.TarInfo(f"{sample:08d}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def job(steps: int, seed: int) -> Data:
    """A job of encoder ranks that take 128 images each at a time."""
    modules = [{"name": "vit", "kind": "encoder", "dp": RANKS}, {"name": "llm", "kind": "backbone", "dp": RANKS}]
    stream = {"datasets": [{"name": "tiny"}], "seq_len": 256, "global_batch": STEP_IMAGES, "seed": seed}
    execution = {"modules": modules, "microbatch": STEP_IMAGES // RANKS, "end": {"steps": steps}}
    return {"stream": {**stream, "packing": {"enabled": False}}, "execution": execution}


def read(address: str, data: Data, ranks: Sequence[int]) -> None:
    """Read the encoder's views of some ranks, each over a connection of its own."""

    def one(rank: int) -> None:
        with grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            request = pb.GetOrCreateJobRequest(job_spec_json=json.dumps(data))
            job_id = DataServiceStub(channel).GetOrCreateJob(request, timeout=TIMEOUT_S).job_id
            opened: Any = channel.unary_stream(STREAM, pb.StreamMicrobatchesRequest.SerializeToString, None)
            for _ in opened(pb.StreamMicrobatchesRequest(job_id=job_id, module="vit", rank=rank), timeout=TIMEOUT_S):
                pass

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(one, ranks))


def tiny_s(folder: Path, shards: Path, steps: int, rounds: int) -> list[float]:
    """CPU seconds of a server for each tiny image."""
    with Processes(folder) as processes:
        child = processes.start("server", [*SERVER, "serve", "--dataset", f"tiny={shards}", "--listen", "127.0.0.1:0"])
        address, server = processes.address(child), psutil.Process(child.process.pid)
        read(address, job(2, 1 << 20), range(RANKS))
        found = []
        for number in range(rounds):
            before = sum(server.cpu_times()[:2])
            read(address, job(steps, number), range(RANKS))
            found.append((sum(server.cpu_times()[:2]) - before) / (steps * STEP_IMAGES))
        return found


def tiny_row(rounds: int, steps: int = 12) -> Row:
    """Images a second that one process hands out, from so many rounds of so many steps."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_shards(folder / "shards", 8, 2000)
        subprocess.run([*SERVER, "index", str(folder / "shards")], check=True, stdout=subprocess.DEVNULL)
        found = tiny_s(folder, folder / "shards", steps, rounds)
    each = f"{spread([1e6 * seconds for seconds in found], '.0f')} CPU-us for a tiny one"
    return Row("images a second that one process hands out", f"{1 / statistics.median(found):,.0f}; {each}", "", None)
