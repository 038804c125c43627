"""tf.data service, its worker in a process of its own: `tfdata_service.py SHARDS COUNT COMPRESSION` (none or auto).

Its graph runs in another process, which knows no function of ours: so it decodes and scales with TensorFlow's own
operations, libjpeg-turbo at a power of two and a linear filter as in `common.fast`.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from loaders.common import BLOCK, MAX_BLOCKS, PATCH, Files, members, read
from loaders.reporting import BATCH, PREPARE, report

SERVE = "serve"
"""Given instead of a compression: be the worker."""
service = tf.data.experimental.service


def copied(shards: Path) -> Path:
    """The images as TFRecords, beside the shards."""
    folder = shards.with_name("tfrecords")
    if not folder.exists():
        folder.mkdir()
        files: Files = {}
        with tf.io.TFRecordWriter(str(folder / "images")) as writer:
            for place in members(shards):
                writer.write(read(files, place))
    return folder


def grid(width: Any, height: Any) -> tuple[Any, Any]:
    """(columns, rows) of merge blocks, as `common.grid`."""
    wide, high = tf.cast(width, tf.float64), tf.cast(height, tf.float64)
    scale = tf.minimum(tf.constant(1.0, tf.float64), tf.sqrt(MAX_BLOCKS * BLOCK * BLOCK / (wide * high)))
    columns, rows = (tf.maximum(1, tf.cast(tf.round(side * scale / BLOCK), tf.int32)) for side in (wide, high))

    def smaller(columns: Any, rows: Any) -> tuple[Any, Any]:
        wider = tf.cast(columns >= rows, tf.int32)
        return columns - wider, rows - (1 - wider)

    found: tuple[Any, Any] = tf.while_loop(lambda c, r: c * r > MAX_BLOCKS, smaller, (columns, rows))
    return found


def patches(data: Any) -> tuple[Any, Any]:
    """JPEG bytes to patches, uint8 [patches, 588], in the order of merge blocks; and how many there are."""
    shape = tf.io.extract_jpeg_shape(data)
    columns, rows = grid(shape[1], shape[0])
    goal = rows * BLOCK, columns * BLOCK
    covers = [shape[0] // k >= goal[0] for k in (8, 4, 2)], [shape[1] // k >= goal[1] for k in (8, 4, 2)]
    branches = [
        (tf.logical_and(high, wide), lambda k=k: tf.io.decode_jpeg(data, 3, ratio=k))
        for k, high, wide in zip((8, 4, 2), *covers, strict=True)
    ]
    pixels = tf.case(branches, default=lambda: tf.io.decode_jpeg(data, 3))
    scaled = tf.cast(tf.clip_by_value(tf.image.resize(pixels, goal, "bilinear") + 0.5, 0, 255), tf.uint8)
    blocks = tf.reshape(scaled, (rows, 2, PATCH, columns, 2, PATCH * 3))
    cut = tf.reshape(tf.transpose(blocks, (0, 3, 1, 4, 2, 5)), (-1, PATCH * PATCH * 3))
    return cut, tf.shape(cut)[0]


def batches(folder: Path, address: str, compression: str | None) -> Iterator[int]:
    """Images of each batch, for ever."""
    dataset = tf.data.TFRecordDataset(str(folder / "images")).repeat()
    dataset = dataset.map(patches, num_parallel_calls=2, deterministic=True).ragged_batch(BATCH, drop_remainder=True)
    dataset = dataset.map(lambda all_, counts: (all_.values, counts)).prefetch(4)
    protocol = {} if compression else {"data_transfer_protocol": "grpc"}
    dataset = dataset.apply(
        service.distribute("parallel_epochs", address, compression=compression, max_outstanding_requests=4, **protocol)
    )
    for _, counts in dataset.as_numpy_iterator():
        yield len(counts)


def serve() -> None:
    """Be the dispatcher and the worker until the end of stdin."""
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0, protocol="grpc"))
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address, port=0, protocol="grpc"))
    print(dispatcher.target, flush=True)
    sys.stdin.read()
    del worker


def main() -> None:
    """Start the worker, and read from it."""
    copy = copied(Path(sys.argv[1]))
    if sys.argv[3] == PREPARE:
        return
    command = [sys.executable, "-m", "loaders.tfdata_service", sys.argv[1], "0", SERVE]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        report(batches(copy, address, None if sys.argv[3] == "none" else "AUTO"), int(sys.argv[2]))
    finally:
        server.kill()


if __name__ == "__main__":
    if sys.argv[3] == SERVE:
        serve()
    else:
        main()
