"""What a checkpoint holds besides tensors: what the trainer says of itself, who wrote it, and sums of all files."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c as crc32c_of
from torch import Tensor

from dataserver.outputs import write_whole
from trainclient.models.noise import NOISE_VERSION

STATE_VERSION: Final = 5
"""Version of the fields of `TrainerState` and `Manifest`, and of the metrics within: another field takes another
version."""
READ_VERSIONS: Final = (2, 3, 4, STATE_VERSION)
"""2 is without metrics that lack an evaluation; 2 and 3 without what updates were made with; all but the last without
sums, writer and line."""
STATE_FILE: Final = "trainer.json"
REMEDY: Final = "check the storage and its space"
OTHERWISE: Final = "--resume-from newest-whole goes on from the newest checkpoint that is whole"
MAX_STATE_BYTES: Final = 256 << 20


def is_state(name: str) -> bool:
    """Whether a tensor of that name is state of an optimizer; the parameter's name stands before it."""
    return "/" in name


def module_of(name: str) -> str:
    """The module that a tensor belongs to; names of modules have no dot."""
    return name.partition(".")[0]


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed, or not by this job."""


class SaveError(CheckpointError):
    """A checkpoint that cannot be written. All processes raise it with the same message."""

    known_to_all = True


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What the trainer says of itself."""

    cursor: dict[str, Any]
    """`DataClient.state_dict()`: version, stream_id, step, and the stream to tell what differs from another one."""
    modules: dict[str, Any]
    """Sizes of every module by its name."""
    images: int = 0
    """Images of all steps so far."""
    invalid_images: int = 0
    """Images of these that could not be decoded."""
    version: int = STATE_VERSION
    noise_version: int = NOISE_VERSION
    """Version of the diffusion noise; states that do not give it are of version 1."""
    run: str = ""
    """Name of the run, which its metrics carry."""
    frozen: list[str] = field(default_factory=list)
    """Modules that were not trained in the last step, and parts of modules (`vit.layers`): the tensors hold no state of
    an optimizer for them."""
    unevaluated: dict[str, Any] | None = None
    """Metrics of the last step, if the run was asked to stop before its evaluation had a result."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """What updates were made with (`training/changed_settings.py`), to tell what differs when a run resumes."""
    degrees: dict[str, Any] = field(default_factory=dict)
    """Parallel degrees of every module by its name, for whoever lists checkpoints."""

    def readable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those tensors that the checkpoint holds: where a module or a part was frozen, its optimizer begins anew."""
        inside = tuple(f"{part}." for part in self.frozen)
        begins_anew = {n for n in tensors if is_state(n) and f"{n.partition('/')[0]}.".startswith(inside)}
        return {name: tensor for name, tensor in tensors.items() if name not in begins_anew}

    @property
    def step(self) -> int:
        """The first step that is not in the parameters."""
        return int(self.cursor["step"])

    def require_modules(self, modules: dict[str, Any], where: Path) -> None:
        """Raise CheckpointError, with what differs, unless all of these models are in the checkpoint.

        What a model does not have (none, false, 0) may be missing: older releases did not know of it.
        """
        different = [
            f"{name}.{key}: {value!r} here, {self.modules[name].get(key)!r} there"
            for name, sizes in modules.items()
            for key, value in sizes.items()
            if name in self.modules and (value or None) != (self.modules[name].get(key) or None)
        ]
        untied = [n for n, sizes in modules.items() if sizes.get("tied") and "tied" not in self.modules.get(n, sizes)]
        if untied:
            raise CheckpointError(
                f"the checkpoint {where} is of an older release, which trained the head of {untied[0]} beside its "
                "embedding; this release has them as one. Export the checkpoint with `trainclient export` of that "
                "release, and start a new run from the folder"
            )
        different += [f"no module {name} there, only {list(self.modules)}" for name in modules.keys() - self.modules]
        if different:
            raise CheckpointError(
                f"the checkpoint {where} has other models ({'; '.join(different)}); give the sizes and module names it "
                "was made with"
            )


@dataclass(frozen=True, slots=True)
class FileSum:
    """What a file has to hold."""

    bytes: int
    crc32c: str
    """CRC-32C of the file as 8 hex digits."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that wrote a checkpoint."""

    host: str
    pid: str
    attempt: str
    number: int
    """Number of the lease that the attempt had."""
    release: str
    saved: str
    """When, by the writer's clock, in ISO 8601."""


@dataclass(frozen=True, slots=True)
class Line:
    """A sequence of checkpoints in which each continues the one before.

    Another line begins where training goes on from another checkpoint than the newest.
    """

    number: int = 0
    """The line with the highest number in a folder is the newest."""
    before: tuple[tuple[int, int], ...] = ()
    """(line, last step of it) of all that this one continues."""
    asked: tuple[tuple[int, str], ...] = ()
    """(step, digest of the settings) of each `--resume-from STEP` that led here."""

    def holds(self, line: int, step: int) -> bool:
        """Whether a checkpoint of that line and step is one that this line continues, or is of it."""
        return line == self.number or any(line == number and step <= last for number, last in self.before)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything in a checkpoint's `trainer.json`."""

    state: TrainerState
    files: dict[str, FileSum] | None = None
    """Sums of every other file of the checkpoint; None if an older release wrote none."""
    writer: Writer | None = None
    line: Line = Line()


def read_manifest(path: Path) -> Manifest:
    """What a checkpoint holds besides tensors.

    Raises:
        CheckpointError: it cannot be read, is damaged, or was written by another release.
    """
    try:
        with (path / STATE_FILE).open("rb") as file:
            data = json.loads(file.read(MAX_STATE_BYTES))
        version = data["version"]
        found = _manifest(data) if version in READ_VERSIONS else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the checkpoint {path} cannot be read ({STATE_FILE}: {said}); {OTHERWISE}") from None
    if found is None:
        raise CheckpointError(
            f"the checkpoint {path} has state version {version}; this release reads {READ_VERSIONS[0]} to "
            f"{READ_VERSIONS[-1]}: resume it with the release that made it"
        )
    if found.state.noise_version != NOISE_VERSION:
        raise CheckpointError(
            f"the checkpoint {path} was trained with noise version {found.state.noise_version}; this release makes "
            f"{NOISE_VERSION}, and the same steps would give another model: resume it with the release that made it"
        )
    return found


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write what a checkpoint holds besides tensors, durably and at once."""
    data = asdict(manifest.state) | {"line": asdict(manifest.line)}
    if manifest.writer is not None:
        data["writer"] = asdict(manifest.writer)
    if manifest.files is not None:
        data["files"] = {name: asdict(found) for name, found in sorted(manifest.files.items())}
    data["crc32c"] = _own_sum(data)
    write_whole(folder / STATE_FILE, json.dumps(data, sort_keys=True, indent=1))


def _own_sum(data: dict[str, Any]) -> str:
    """CRC-32C of all else that stands in the file."""
    rest = {key: value for key, value in data.items() if key != "crc32c"}
    return f"{crc32c_of(json.dumps(rest, sort_keys=True).encode()):08x}"


def _manifest(data: dict[str, Any]) -> Manifest:
    """What `data` says; ValueError, TypeError or KeyError where it is not what was written."""
    if data["version"] == STATE_VERSION and data["crc32c"] != (found := _own_sum(data)):
        raise ValueError(f"it is damaged: it has CRC-32C {found} and was written with {data['crc32c']}")
    ours = {"files", "writer", "line", "crc32c"}
    state = TrainerState(**{"noise_version": 1, **{key: value for key, value in data.items() if key not in ours}})
    if not isinstance(state.cursor["step"], int) or not isinstance(state.modules, dict):
        raise TypeError("step or modules are of another type")
    line, files, writer = data.get("line"), data.get("files"), data.get("writer")
    manifest = Manifest(
        state,
        None if files is None else {_plain(name): FileSum(**found) for name, found in files.items()},
        None if writer is None else Writer(**writer),
        Line() if line is None else Line(line["number"], _pairs(line["before"]), _pairs(line["asked"])),
    )
    numbers = [manifest.line.number, *(file.bytes for file in (manifest.files or {}).values())]
    numbers += [] if manifest.writer is None else [manifest.writer.number]
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError("numbers are of another type")
    return manifest


def _pairs(found: list[list[Any]]) -> tuple[tuple[Any, Any], ...]:
    return tuple((first, second) for first, second in found)


def _plain(name: str) -> str:
    """A name of a file within the checkpoint's folder."""
    if "/" in name or name in ("", ".", "..", STATE_FILE):
        raise ValueError(f"a file is called {name!r}")
    return name
