"""Runs transforms of users for many threads, each call in a process that has nothing else to do meanwhile."""

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.job.fields import InstalledPixels, InstalledTransform, Stream
from dataserver.transforms.errors import (
    TransformError,
    TransformFailedError,
    TransformUnavailableError,
    TransformUnknownError,
)
from dataserver.transforms.installed import Installed, Kind, find_installed
from dataserver.transforms.process import Made, TransformProcess

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)

TIMEOUT_S: Final = 30.0
"""Time of a call, by default. A batch of texts and a shard's metadata get `BATCH_CALLS` times as much."""
BATCH_CALLS: Final = 20
MAX_BATCH_BYTES: Final = 1 << 30
"""What a transform may make of a batch of texts, or of a shard's metadata."""
U8 = NDArray[np.uint8]
Pixels = Callable[[U8, InstalledPixels, Sequence[int]], U8]
"""Takes upright pixels, uint8 [height, width, 3], options and words; returns pixels of the same shape."""


@dataclass(frozen=True, slots=True)
class TextOrFailure:
    """What became of one text: `text`, or the reason why there is none."""

    text: str | None
    reason: str = ""


class TransformPool:
    """The transforms that an operator named, and processes for as many of them as are called at once. Thread-safe."""

    def __init__(self, installed: Mapping[str, Installed], timeout_s: float = TIMEOUT_S) -> None:
        self.installed = installed
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[TransformProcess] = []
        self._told: set[str] = set()
        """Transforms whose first failure is in the log."""

    @classmethod
    def of(
        cls, named: Mapping[str, str], timeout_s: float = TIMEOUT_S, kinds: Collection[Kind] = frozenset(Kind)
    ) -> "TransformPool":
        """The transforms of these names and versions.

        Raises:
            TransformError: one is not installed, or is none of these kinds.
        """
        installed = find_installed(named)
        for one in installed.values():
            if one.kind not in kinds:
                raise TransformError(
                    f"--transform {one} is a transform of {one.kind}, and those of {', '.join(kinds)} are wanted here: "
                    "pixels are transformed by dataserver serve, texts and metadata by dataserver index"
                )
        return cls(installed, timeout_s)

    def check(self) -> None:
        """Import every transform in a process. Raises TransformError where one cannot be used."""
        if not self.installed:
            return
        process = self._taken()
        try:
            for one in self.installed.values():
                process.load(one)
        except TransformUnavailableError as error:
            raise TransformError(str(error)) from None
        finally:
            self._give_back(process)

    def close(self) -> None:
        """End all processes that wait for work."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()

    def find(self, wanted: InstalledTransform, kind: Kind) -> Installed:
        """The transform that a job asks for.

        Raises:
            TransformUnknownError: the operator did not name it, or another version, or it is of another kind.
        """
        found = self.installed.get(wanted.name)
        if found is None or found.version != wanted.version:
            here = sorted(map(str, self.installed.values()))
            raise TransformUnknownError(
                f"the job asks for the transform {wanted.name}={wanted.version}, and there are {here or 'none'} here: "
                f"install its package and add --transform {wanted.name}={wanted.version}, or change the job"
            )
        if found.kind is not kind:
            raise TransformUnknownError(
                f"the transform {found} is one of {found.kind}, and the job asks for one of {kind}: name it where "
                f"transforms of {found.kind} stand"
            )
        return found

    def check_pixels(self, stream: Stream) -> None:
        """Find out whether this server has the transforms of pixels that a job asks for.

        Raises:
            TransformUnknownError: it has not.
        """
        for wanted in stream.transforms or ():
            if isinstance(wanted, InstalledPixels):
                self.find(wanted, Kind.PIXELS)

    def pixels(self, pixels: U8, options: InstalledPixels, words: Sequence[int]) -> U8:
        """Transform upright pixels, uint8 [height, width, 3].

        Raises:
            TransformFailedError: the transform raised, or returned another shape or dtype: the image is invalid.
            TransformUnavailableError: it took too long, or had no memory, file or thread, or its process died.
            TransformUnknownError, TransformError: it is not here, or cannot be imported.
        """
        asked = {"kind": "pixels", "shape": list(pixels.shape), "words": [int(word) for word in words]}
        data = np.ascontiguousarray(pixels).data.cast("B")
        made = self.call(self.find(options, Kind.PIXELS), options, asked, data, self.timeout_s, len(data))
        if len(made.data) != pixels.size:
            raise TransformUnavailableError(
                f"the transform {options.name} gave {len(made.data)} of {pixels.size} bytes"
            )
        return made.data.reshape(pixels.shape)

    def texts(self, texts: Sequence[str], wanted: InstalledTransform) -> list[TextOrFailure]:
        """What a transform makes of each text. Raises as `pixels`, but for texts that it fails for."""
        data = json.dumps(list(texts)).encode()
        found = self.find(wanted, Kind.TEXT)
        made = self.call(found, wanted, {"kind": "text"}, data, BATCH_CALLS * self.timeout_s, MAX_BATCH_BYTES)
        return [TextOrFailure(*entry) for entry in json.loads(made.data.tobytes())]

    def metadata(self, table: "pa.Table", wanted: InstalledTransform) -> "pa.Table":
        """The columns that a transform makes of the columns of a shard, one row each. Raises as `pixels`."""
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        found = self.find(wanted, Kind.METADATA)
        data = memoryview(sink.getvalue())
        made = self.call(found, wanted, {"kind": "metadata"}, data, BATCH_CALLS * self.timeout_s, MAX_BATCH_BYTES)
        return pa.ipc.open_stream(pa.py_buffer(made.data)).read_all()

    def call(
        self,
        installed: Installed,
        wanted: InstalledTransform,
        asked: Mapping[str, Any],
        data: bytes | memoryview,
        deadline_s: float,
        most: int,
    ) -> Made:
        """Run a transform in a process that has nothing else to do; raises as `pixels`."""
        process = self._taken()
        try:
            process.load(installed)
            return process.call(installed, {**asked, "options": dict(wanted.options or {})}, data, deadline_s, most)
        except TransformFailedError as error:
            if installed.name not in self._told:
                self._told.add(installed.name)
                _log.warning("%s; further failures of it are not logged, and counted as invalid images", error)
            raise
        except TransformUnavailableError as error:
            _log.error("%s", error)
            raise
        except TransformError:
            raise
        except BaseException:
            process.close()  # in the middle of a call
            raise
        finally:
            self._give_back(process)

    def _taken(self) -> TransformProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return TransformProcess()

    def _give_back(self, process: TransformProcess) -> None:
        if not process.is_over:
            with self._lock:
                self._idle.append(process)


NO_TRANSFORMS: Final = TransformPool({})
