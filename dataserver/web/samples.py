"""Samples of a dataset: found by key, filter or size, and shown with their texts, columns and pictures.

A request looks through shards for about a second, and says where the next one goes on: so the largest dataset answers
as quickly as a small one. Pictures are decoded by the servers' own bounded decoder and encoded again; the bytes of a
dataset reach no browser but as hexadecimal digits.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from time import monotonic
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.assembly import fault_of, format_name
from dataserver.dataset import Dataset, DatasetError, Filter, ImageRef, Shard, ShardReadError, compile_filter, describe
from dataserver.images import U8, ImageFault, ImageShape, decode_patches
from dataserver.planning.job.fields import Sizing
from dataserver.video import VideoShape, decode_first_frame
from dataserver.web.assets import Body
from dataserver.web.datasets import DatasetPages, number
from dataserver.web.server import Query, RequestError, Route

FOUND: Final = 24
"""Most samples in one answer."""
LOOK_S: Final = 1.0
"""Seconds for which one answer looks through shards; it ends with the shard that it is at."""
MAX_TEXT_CHARS: Final = 20_000
MAX_PARTS: Final = 200
MAX_IMAGES: Final = 16
"""Images of one sample that are shown."""
MAX_KEY_CHARS: Final = 1024
HEX_BYTES: Final = 64
MAX_SIDE: Final = 1024
"""Pixels of the longer side of a picture."""
PIXELS: Final = Sizing(patch=1, merge=1, max_patches=MAX_SIDE**2)
"""A patch is a pixel."""
MAX_DECODING: Final = 2
"""Images that are decoded at once: each may take hundreds of MB."""
DECODING_BUSY: Final = "many images are being decoded; ask again"
DECODING_S: Final = 10.0
"""Seconds for which a request waits for its turn."""
MAX_SEARCHING: Final = 2
"""Searches at once: each takes much of the interpreter's time, which may be that of a server."""
MAX_PIXELS_OF_SIDE: Final = 1 << 20


def dataset_routes(datasets: DatasetPages) -> dict[str, Route]:
    """What the page of datasets asks for."""
    samples = SamplePages(datasets)
    return {
        "/api/datasets": datasets.names,
        "/api/dataset/card": datasets.card,
        "/api/dataset/findings": datasets.findings,
        "/api/dataset/samples": samples.search,
        "/api/dataset/sample": samples.sample,
        "/api/dataset/picture": samples.picture,
    }


class SamplePages:
    """The samples of datasets that may be shown. Thread-safe."""

    def __init__(self, datasets: DatasetPages) -> None:
        self._datasets = datasets
        self._decoding = threading.BoundedSemaphore(MAX_DECODING)
        self._searching = threading.BoundedSemaphore(MAX_SEARCHING)

    def search(self, query: Query) -> dict[str, Any]:
        """Samples in the order of the dataset whose key contains `key`, which `filter` keeps, and with an image whose
        longer side has from `least` to `most` pixels; from `shard` and `row` on."""
        _, dataset = self._datasets.named(query)
        shard, row = number(query, "shard", 0, 1 << 32), number(query, "row", 0, 1 << 32)
        with _turn(self._searching, "many searches are under way; ask again"):
            return self._found(_Wanted(query, dataset), dataset, shard, row)

    def _found(self, wanted: "_Wanted", dataset: Dataset, shard: int, row: int) -> dict[str, Any]:
        places: list[tuple[int, int]] = []
        end = monotonic() + LOOK_S
        try:
            while shard < len(dataset.shards) and len(places) < FOUND and monotonic() < end:
                rows = wanted.rows(dataset.shards[shard])
                rows = rows[rows >= row]
                taken = rows[: FOUND - len(places)].tolist()
                places += [(shard, r) for r in taken]
                shard, row = (shard, taken[-1] + 1) if len(rows) > len(taken) else (shard + 1, 0)
            keys = {n: about.key for n, about in describe(dataset, places)}
            found = [_brief(dataset.shards[s], r, keys[n]) for n, (s, r) in enumerate(places)]
        except (DatasetError, OSError) as error:
            raise _refusal(error) from None
        following = {"shard": shard, "row": row} if shard < len(dataset.shards) else None
        return {"samples": found, "next": following, "shards": len(dataset.shards)}

    def sample(self, query: Query) -> dict[str, Any]:
        """All of one sample: texts, columns, and of each image what the index says, its first bytes and its faults."""
        _, dataset = self._datasets.named(query)
        shard, row = _located(query, dataset)
        try:
            (_, about), parts = next(iter(describe(dataset, [(shard.position, row)]))), shard.parts(row)
            refs = shard.images_of(row)
            images = [self._image(dataset, ref) for ref in refs[:MAX_IMAGES]]
        except (DatasetError, OSError) as error:
            raise _refusal(error) from None
        return {
            "shard": shard.position,
            "row": row,
            "name": shard.name,
            "key": about.key,
            "texts": [text[:MAX_TEXT_CHARS] for text in parts.texts[:MAX_PARTS]],
            "kinds": list(parts.kinds[: 2 * MAX_PARTS]),
            "more_texts": max(len(parts.texts) - MAX_PARTS, 0),
            "columns": [{"name": n, "value": _shown(value)} for n, value in about.columns.items()],
            "images": images,
            "more_images": max(len(refs) - MAX_IMAGES, 0),
        }

    def picture(self, query: Query) -> Body:
        """An image of a sample, or the first frame of a video, as a JPEG of at most `side` pixels, where the servers'
        decoder makes one of it."""
        _, dataset = self._datasets.named(query)
        shard, row = _located(query, dataset)
        i, side = number(query, "image", 0, 1 << 32), max(number(query, "side", 256, MAX_SIDE), 1)
        try:
            refs = shard.images_of(row)
            if i >= len(refs):
                raise RequestError(f"image {i} was asked for; the sample has {len(refs)}", HTTPStatus.NOT_FOUND)
            if refs[i].is_audio:
                raise RequestError(f"item {i} of the sample is a clip, which has no picture", HTTPStatus.NOT_FOUND)
            with _turn(self._decoding, DECODING_BUSY):
                body = thumbnail(dataset.read(refs[i]), refs[i], side)
        except (DatasetError, OSError) as error:
            raise _refusal(error) from None
        if body is None:
            raise RequestError("these bytes hold no picture that servers decode", HTTPStatus.NOT_FOUND)
        return Body("image/jpeg", body)

    def _image(self, dataset: Dataset, ref: ImageRef) -> dict[str, Any]:
        with _turn(self._decoding, DECODING_BUSY):
            data = dataset.read(ref)
            fault = _fault(data, ref)
        return {
            "width": ref.width,
            "height": ref.height,
            "bytes": ref.length,
            "offset": ref.offset,
            "orientation": ref.orientation,
            "format": format_name(data, ref, "unknown"),
            "is_audio": ref.is_audio,
            "is_video": not (ref.is_image or ref.is_audio),
            "frames": ref.frames,
            "microseconds": ref.microseconds,
            "hex": data[:HEX_BYTES].hex(" "),
            "fault": None if fault is None else fault.detail,
            "served": fault is None or fault.is_served,
        }


@contextmanager
def _turn(turns: threading.BoundedSemaphore, busy: str) -> Iterator[None]:
    """One of so many at once; RequestError where none comes for a while."""
    if not turns.acquire(timeout=DECODING_S):
        raise RequestError(busy, HTTPStatus.SERVICE_UNAVAILABLE)
    try:
        yield
    finally:
        turns.release()


class _Wanted:
    """Which samples of a shard a search is after."""

    def __init__(self, query: Query, dataset: Dataset) -> None:
        self._key = query.get("key", "")[:MAX_KEY_CHARS]
        self._least = number(query, "least", 0, MAX_PIXELS_OF_SIDE)
        self._most = number(query, "most", MAX_PIXELS_OF_SIDE, MAX_PIXELS_OF_SIDE)
        self._filter: Filter | None = None
        if text := query.get("filter", "").strip():
            try:
                self._filter = compile_filter(text)
                self._filter.check(dataset.shards)
            except DatasetError as error:
                raise RequestError(str(error)) from None

    def rows(self, shard: Shard) -> NDArray[np.int64]:
        """Rows that match, int64 [n], ascending."""
        mask = np.ones(shard.num_samples, np.bool_)
        if self._filter is not None:
            mask &= self._filter.mask(shard)
        if self._least > 0 or self._most < MAX_PIXELS_OF_SIDE:
            sizes = shard.sizes()
            side = np.maximum(sizes.image_width, sizes.image_height)
            if sizes.image_modality is not None:
                side = np.where(sizes.image_modality == 0, side, -1)  # only images are searched
            fits = np.concatenate([[0], np.cumsum((side >= self._least) & (side <= self._most))])
            mask &= fits[sizes.image_offsets[1:]] > fits[sizes.image_offsets[:-1]]
        rows = np.flatnonzero(mask)
        if not self._key or not len(rows):
            return rows
        keys = shard.keys()
        return np.array([row for row in rows.tolist() if self._key in keys[row]], np.int64)


def thumbnail(data: bytes, ref: ImageRef, side: int) -> bytes | None:
    """A JPEG of an image as servers decode it, upright, as far as its bytes go, or of the first frame of a video; None
    where they decode nothing."""
    import simplejpeg

    scale = min(side / max(ref.width, ref.height, 1), 1.0)
    columns, rows = max(round(ref.width * scale), 1), max(round(ref.height * scale), 1)
    pixels = np.empty((rows * columns, 3), np.uint8)
    if ref.is_image:
        shape = ImageShape(ref.width, ref.height, ref.orientation, rows, columns, may_be_truncated=True)
        decoded = decode_patches(data, shape, PIXELS, pixels)
    else:
        decoded = _first_frame_fault(data, ref, (rows, columns), pixels) is None
    if not decoded:
        return None
    found: bytes = simplejpeg.encode_jpeg(pixels.reshape(rows, columns, 3), quality=85)
    return found


def _fault(data: bytes, ref: ImageRef) -> ImageFault | None:
    """Why servers deliver an item as invalid, or a part of it; of a video as far as its first frame shows that, since
    all of it may take minutes."""
    if ref.is_image or ref.is_audio:
        return fault_of(data, ref)
    why = _first_frame_fault(data, ref, (1, 1), np.empty((1, 3), np.uint8))
    return None if why is None else ImageFault(why, is_served=False)


def _first_frame_fault(data: bytes, ref: ImageRef, grid: tuple[int, int], pixels: U8) -> str | None:
    shape = VideoShape(ref.frames, ref.microseconds, ref.width, ref.height, ref.orientation)
    return decode_first_frame(data, shape, grid, PIXELS, pixels)


def _located(query: Query, dataset: Dataset) -> tuple[Shard, int]:
    shard, row = number(query, "shard", 0, 1 << 32), number(query, "row", 0, 1 << 32)
    if shard >= len(dataset.shards) or row >= dataset.shards[shard].num_samples:
        raise RequestError(f"there is no sample {row} of shard {shard}", HTTPStatus.NOT_FOUND)
    return dataset.shards[shard], row


def _brief(shard: Shard, row: int, key: str) -> dict[str, Any]:
    texts, refs = shard.parts(row).texts, shard.images_of(row)
    return {
        "shard": shard.position,
        "row": row,
        "name": shard.name,
        "key": key,
        "text": " ".join(text[:300] for text in texts[:4])[:300],
        "images": len(refs),
        "sizes": [[ref.width, ref.height] for ref in refs if ref.is_image][:1],
        "clips": sum(ref.is_audio for ref in refs),
        "videos": sum(not (ref.is_image or ref.is_audio) for ref in refs),
        "first_image": next((n for n, ref in enumerate(refs) if not ref.is_audio), None),
    }


def _shown(value: Any) -> Any:
    """A value of a column: text cut, and what JSON has no word for as text."""
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARS]
    return value if isinstance(value, bool) else str(value)


def _refusal(error: Exception) -> RequestError:
    status = HTTPStatus.BAD_GATEWAY if isinstance(error, ShardReadError | OSError) else HTTPStatus.CONFLICT
    return RequestError(str(error), status)
