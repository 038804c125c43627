"""The stream of a rank that runs the full model, encoder and backbone, as most trainers do: both views side by side.

Such a trainer moves no rows between ranks, so the images of a sequence must be where the sequence is. A job says so by
`execution.identity_routing`; balance and order of the sequences go by what both cost together.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Self
from weakref import finalize

import numpy as np

from dataserver.planning.job.fields import Modality, ModuleKind, ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.plan.plan import Routing
from trainclient.stream.client import SENT_ELSEWHERE, ArrayClient
from trainclient.stream.errors import PlanMismatchError
from trainclient.stream.fleet import Fleet
from trainclient.stream.jobs import JobSource, resolve_job
from trainclient.stream.microbatch import Array, Microbatch

IGNORED_LABEL = -100
GREY: Final = 128
"""Value of all pixels of an image that stands for missing ones."""


CUT_SHORT: Final = (
    "an error has ended step {} before it was read: begin again from a checkpoint, or set the state or iterate over "
    "the stream once more, with which the step begins anew"
)


class NoDatasetError(ValueError, AttributeError):
    """Something looked for a data set in a stream."""


@dataclass(frozen=True, slots=True)
class FullModelMicrobatch:
    """A microbatch of a rank: its sequences, and their images in the order in which the sequences have them."""

    backbone: Microbatch[Array]
    images: Microbatch[Array] | None
    """The encoder's view; None in a job without encoder."""
    merge: int
    """Side of a block of patches that becomes one token."""

    @property
    def lacks_images(self) -> bool:
        """Whether other ranks have images in this microbatch and this one has none, in a job with modality parity whose
        step left no other way. A sharded encoder then must run on something here as well."""
        return self.backbone.header.images_on_some_ranks and not len(self.rows)

    @property
    def rows(self) -> Array:
        """Tokens that each image takes, int64 [I]."""
        tensors = {"cu_patches": np.zeros(1, np.int32)} if self.images is None else self.images.tensors
        if "cu_rows" in tensors:  # images are cut into tiles
            return np.diff(tensors["cu_rows"]).astype(np.int64)
        return np.diff(tensors["cu_patches"]).astype(np.int64) // self.merge**2

    @property
    def pictures(self) -> tuple[Array, Array]:
        """What the encoder runs on: patches, uint8 [P, patch * patch * 3], and rows and columns of each image, int64
        [I, 2], or of each part of images that are cut into tiles. For a rank that lacks images it is a grey one of a
        single token, which no token embeds: an adapter puts one behind all others, without a label."""
        if self.images is None:
            return np.zeros((0, 0), np.uint8), np.zeros((0, 2), np.int64)
        patches, grid = self.images.tensors["patches"], self.images.tensors["grid"].astype(np.int64)
        if not self.lacks_images:
            return patches, grid
        return np.full((self.merge**2, patches.shape[1]), GREY, np.uint8), np.full((1, 2), self.merge)

    @property
    def wait_s(self) -> float:
        """Seconds that the caller waited for it."""
        return self.backbone.wait_s + (0.0 if self.images is None else self.images.wait_s)

    @property
    def tensors(self) -> dict[str, Array]:
        """Those of both views; labels of samples with an undecodable image are ignored."""
        if self.images is None:
            return dict(self.backbone.tensors)
        return {**self.backbone.tensors, **self.images.tensors, "labels": self._labels(self.images)}

    def token_ids(self, image_token: int) -> Array:
        """Token ids, int32 [T], with a model's own id where it replaces a token by the embedding of an image.

        Raises:
            ValueError: text has this id, too, so that the model would look for more embeddings than there are.
        """
        tensors = self.tensors
        ids, slots = tensors["token_ids"].copy(), tensors["embedding_slots"]
        ids[slots] = image_token
        count = np.count_nonzero(ids == image_token)
        if self.images is not None and count != len(slots):
            raise ValueError(
                f"step {self.backbone.step}, microbatch {self.backbone.microbatch}: {count} tokens have the model's"
                f" image id {image_token}, and images have {len(slots)}: text has this id; count the tokens again with"
                " the model's own tokenizer (dataserver index --tokenizer), or correct the image id"
            )
        return ids

    def _labels(self, images: Microbatch[Array]) -> Array:
        tensors, labels = self.backbone.tensors, self.backbone.tensors["labels"].copy()
        first = tensors["embedding_slots"][(np.cumsum(self.rows) - self.rows)[~images.items.valid]]
        for sample in np.unique(np.searchsorted(tensors["cu_lengths"], first, side="right") - 1).tolist():
            labels[slice(*tensors["cu_lengths"][sample : sample + 2])] = IGNORED_LABEL
        return labels


class Step:
    """One step of a rank. Its microbatches are read from the stream as they are asked for, once.

    Neither a dataclass nor a sequence: trainers walk through those, to move what is in them, and would read them empty.
    """

    __slots__ = ("_ended", "_failed", "_num_read", "_rest", "num_microbatches", "number", "text_tokens")

    def __init__(self, first: FullModelMicrobatch, rest: Iterator[FullModelMicrobatch]) -> None:
        self.number = first.backbone.step
        self.num_microbatches = first.backbone.num_microbatches
        """The same on all ranks; another step may have more."""
        self.text_tokens = first.backbone.text_tokens
        """Denominator of the text loss: target tokens of all ranks."""
        self._rest = chain((first,), rest)
        self._num_read = 0
        self._ended = self._failed = False

    @property
    def microbatches(self) -> Iterator[FullModelMicrobatch]:
        """Those that were not read yet."""
        try:
            for microbatch in self._rest:
                self._num_read += 1
                yield microbatch
        except Exception:
            self._failed = True
            raise
        self._ended = True

    @property
    def was_read(self) -> bool:
        """Whether all of its microbatches were handed out."""
        return self._num_read == self.num_microbatches

    @property
    def has_ended(self) -> bool:
        """Whether who reads it has asked for another one behind the last, and so is done with that one."""
        return self._ended

    def require_read(self) -> None:
        """Raise ValueError if some of its microbatches were not read: what comes next would leave them out."""
        if self._failed and not self.was_read:
            raise ValueError(CUT_SHORT.format(self.number))
        if not self.was_read:
            raise ValueError(
                f"{self._num_read} of the {self.num_microbatches} microbatches of step {self.number} were read when "
                "the next step was asked for, so that samples would be lost: the loop reads ahead, or shares steps out "
                "to ranks that have their own already. Hand it the stream as it is: without a DataLoader around it, "
                "without accelerate's prepare(), and read each step to its end"
            )


class FullModelStream:
    """Iterates over the steps of one rank, to the end of the job."""

    def __init__(
        self, addresses: str | Sequence[str], job: JobSource, *, rank: int, world_size: int, **options: Any
    ) -> None:
        """Open the views of one rank.

        Args:
            addresses: of the servers, see `ViewClient`.
            job: see there. All ranks ask the same server for fields that are left out; `job.text` of one given to the
                others makes sure that they are filled in alike.
            rank: of this process among those that train.
            world_size: their number.
            options: of the clients, see there: compress, prefetch_bytes (of each), max_microbatch_bytes, timeouts,
                credentials, tracing.

        Raises:
            ValueError: the job is for another number of ranks, or has images on other ranks than their sequences.
            ClientError: no server could be reached, or they refuse the job.
        """
        self.job = _resolved(addresses, job, options, speaks=rank == 0)
        execution = self.job.spec.execution
        encoder = _checked_encoder(execution, rank, world_size)
        self.encoder, self.rank, self.world_size = encoder, rank, world_size
        self._process = os.getpid()
        self._given: Step | None = None
        """The step that was handed out last, until the stream is set to another one."""

        def client(module: ModuleSpec) -> ArrayClient:
            return ArrayClient(addresses, self.job.spec, module.name, rank, **options)

        self._backbone = client(execution.backbone)
        try:
            self._encoder = None if encoder is None else client(encoder)
        except BaseException:
            self._backbone.close()
            raise
        # At the latest before the interpreter takes itself apart: most trainers never close what they read.
        self._end = finalize(self, _close, self._clients)

    def __len__(self) -> int:
        return self._backbone.num_steps

    @property
    def step(self) -> int:
        """The step that comes next."""
        return self._backbone.step

    @property
    def wait_s(self) -> float:
        """Seconds that the caller waited for data so far."""
        return sum(client.wait_s for client in self._clients)

    def __iter__(self) -> Iterator[Step]:
        """The steps that are left. A step that was not read to its end, as after an exception, begins anew.

        Raises:
            ValueError: the next step is asked for, or `iter` is called again, and of the last one only the loop knows
                whether it was trained; or this is another process than that which opened the stream.
            ClientError: no server can go on, or servers disagree.
        """
        if os.getpid() != self._process:
            raise ValueError(
                f"the stream was opened in process {self._process} and is read in {os.getpid()}: read it where it was "
                "opened, without a DataLoader around it, or with num_workers=0 (it reads ahead by itself)"
            )
        self._begin_anew()
        while self.step < len(self):
            first = self._next()
            self._given = step = Step(first, self._rest(first))
            yield step
            step.require_read()

    def require_ended(self) -> None:
        """Raise ValueError if there are steps left, to who takes what an error has cut short for the end of the job."""
        if self.step < len(self):
            raise ValueError(CUT_SHORT.format(self.step))

    def _begin_anew(self) -> None:
        """Go back to the beginning of a step that was handed out and not read to its end."""
        step = self._given
        if step is None or step.has_ended:
            return
        if step.was_read:
            raise ValueError(
                f"the loop was left in the last microbatch of step {step.number}, and only it knows whether the step's "
                f"update was made: call stream.go_to({step.number}) if not, stream.go_to({step.number + 1}) if it was"
            )
        self.go_to(step.number)

    def __getitem__(self, number: Any) -> Step:
        """Asked for by torch's DataLoader, and with it by accelerate's prepare(); refused with ValueError."""
        raise ValueError(
            f"step {number} was asked for by its number, as a DataLoader does, which would share out to ranks and "
            "processes what is one rank's already: hand the loop the stream as it is, without a DataLoader around it "
            "and without accelerate's prepare()"
        )

    @property
    def dataset(self) -> Any:
        """Asked for by accelerate's `skip_first_batches`; refused, also as the AttributeError that others expect."""
        raise NoDatasetError(
            "the stream has no dataset whose batches could be skipped: what was trained is in its own state "
            "(load_state_dict, or accelerate's register_for_checkpointing), so leave skip_first_batches out"
        )

    def __reduce__(self) -> Any:
        """Asked for by processes that are spawned; refused with ValueError."""
        raise ValueError(SENT_ELSEWHERE)

    def require_rank_and_size(self, rank: int, world_size: int) -> None:
        """Raise ValueError unless the trainer runs this process as the rank that the stream is of."""
        if (rank, world_size) != (self.rank, self.world_size):
            raise ValueError(
                f"the trainer runs this process as rank {rank} of {world_size}, and the stream is of rank {self.rank} "
                f"of {self.world_size}: open it with rank={rank}, world_size={world_size}"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, the same on every rank; take it between two steps."""
        return self._backbone.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, whatever the number of ranks when it was taken.

        Raises:
            StateError: it is of another version or another stream, or lies beyond the end of the job.
        """
        for client in self._clients:
            client.load_state_dict(state)
        self._given = None

    def go_to(self, step: int) -> None:
        """Begin with a step next, whatever was read; StateError if the job has no such step."""
        self.load_state_dict({**self.state_dict(), "step": step})

    def close(self) -> None:
        """End the streams; closing again changes nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _clients(self) -> tuple[ArrayClient, ...]:
        return (self._backbone,) if self._encoder is None else (self._backbone, self._encoder)

    def _rest(self, microbatch: FullModelMicrobatch) -> Iterator[FullModelMicrobatch]:
        while not microbatch.backbone.last_of_step:
            microbatch = self._next()
            yield microbatch

    def _next(self) -> FullModelMicrobatch:
        number = self.step
        try:
            return self._both()
        except BaseException:
            self.go_to(number)  # one view may be ahead of the other, or of what was handed out
            raise

    def _both(self) -> FullModelMicrobatch:
        """Both views of the next microbatch."""
        backbone = next(self._backbone)
        images = None if self._encoder is None else next(self._encoder)
        if images is not None and images.plan_hash != backbone.plan_hash:
            raise PlanMismatchError(
                f"the views of step {backbone.step} have plans {backbone.plan_hash.hex()} and {images.plan_hash.hex()};"
                " the servers run different releases: install the same one on all"
            )
        for routing in backbone.routings:
            _require_beside(routing)
        return FullModelMicrobatch(backbone, images, self.job.stream.sizing.merge)


def _close(clients: Sequence[ArrayClient]) -> None:
    for client in clients:
        client.close()


def _require_beside(routing: Routing) -> None:
    """Raise ValueError if rows of images leave their rank or microbatch, or come in another order."""
    ends = ("rank", "microbatch", "start")
    if any((getattr(routing, f"source_{end}") != getattr(routing, f"target_{end}")).any() for end in ends):
        raise ValueError(
            f"the plan moves rows from {routing.source_module} to {routing.target_module} between ranks or "
            "microbatches, which execution.identity_routing forbids: use servers of one release"
        )


def _resolved(addresses: str | Sequence[str], job: JobSource, options: Mapping[str, Any], *, speaks: bool) -> Job:
    of_fleet = {name: options[name] for name in ("timeouts", "credentials") if name in options}
    fleet = Fleet(addresses, **of_fleet, speaks=speaks)
    try:
        return resolve_job(job, fleet)
    finally:
        fleet.close()


def require_rank(backbone: ModuleSpec, rank: int, world_size: int) -> None:
    """Raise ValueError unless that many ranks train, and this is one of them."""
    if backbone.dp != world_size:
        raise ValueError(
            f"this is rank {rank} of {world_size}, and module {backbone.name} has dp {backbone.dp}: set its dp to the "
            "number of processes that train (checkpoints of another dp are resumed all the same)"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} of {world_size}: number the processes from 0 to {world_size - 1}")


def _checked_encoder(execution: Execution, rank: int, world_size: int) -> ModuleSpec | None:
    """The encoder whose images stay with their sequences, if the job has one; ValueError where they would not."""
    backbone, encoders = execution.backbone, execution.of_kind(ModuleKind.ENCODER)
    generators = execution.of_kind(ModuleKind.GENERATOR)
    if generators or len(encoders) > 1:
        names = [m.name for m in (*encoders, *generators)]
        raise ValueError(
            f"the job has the modules {names} beside its backbone; ranks that run all modules can have one encoder and "
            "no generator: `trainclient train` runs the others"
        )
    require_rank(backbone, rank, world_size)
    if encoders and encoders[0].reads is not Modality.IMAGE:
        raise ValueError(
            f"module {encoders[0].name} encodes {encoders[0].reads}, and ranks that run all modules encode images "
            "alone: `trainclient train` runs it"
        )
    if encoders and not execution.identity_routing:
        raise ValueError(
            f"images of module {encoders[0].name} may be on other ranks than their sequences, which ranks that run all "
            "modules cannot exchange: set execution.identity_routing to true"
        )
    return encoders[0] if encoders else None
