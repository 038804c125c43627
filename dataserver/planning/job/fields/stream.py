"""Which samples each step holds, and what they look like."""

from bisect import bisect_right
from collections.abc import Iterator
from enum import StrEnum
from fractions import Fraction
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from dataserver.planning.job.fields.documents import DocumentSpec, ItemBudget
from dataserver.planning.job.fields.sizing import Sizing
from dataserver.planning.job.fields.transforms import InstalledTransforms, Transforms
from dataserver.planning.job.fields.values import (
    DecimalString,
    Digest,
    MaybeDigest,
    Name,
    Natural,
    Positive,
    SpecModel,
    TokenId,
)
from dataserver.planning.job.fields.weights import MAX_SHARES, Weight, WeightPiece

SUPPORTED_ORDER_VERSIONS = frozenset({1, 2})
SUPPORTED_CONTENT_VERSIONS = frozenset({2})
MAX_EARLIER: Final = 16
"""Streams in a row that continue each other."""


class CaptionShare(SpecModel):
    """One of the captions among which each sample draws."""

    name: Name
    """Name that `dataserver index --caption` gave it; `own` is the sample's own text."""
    weight: DecimalString = "1"
    """Probability to be drawn, relative to the other weights."""


class CutAt(StrEnum):
    """Where a conversation is cut that is longer than a sequence."""

    TURN = "turn"
    """Behind the last answer that fits; images behind it are not seen."""


class ConversationSpec(SpecModel):
    """How the conversations of a dataset become sequences."""

    template: Digest
    """Digest of the tokenizer's chat template and of the rules of rendering, as `dataserver index` prints it."""
    cut_at: CutAt | None = None
    """Where a conversation longer than `seq_len` is cut. By default it is left out; a conversation whose first answer
    does not fit is always left out."""


class DatasetSpec(SpecModel):
    """One dataset of the mixture."""

    name: Name
    """Name of the dataset; the configuration of each server says where it is."""
    fingerprint: Digest
    """Fingerprint that `dataserver index` prints; copies of the dataset have the same one."""
    weight: Weight = "1"
    """Share of the step's tokens (of its samples without packing), relative to the other weights. A list of pieces
    changes it over the steps: each piece holds from its `from_step` on. Pieces are in ascending order, and the first
    begins with the first step."""
    filter: Annotated[str, Field(max_length=4096)] = ""
    """Condition on columns, such as `width >= 256 and punsafe < 0.1`; if empty, all samples are read."""
    quarantine: MaybeDigest = ""
    """Digest of the quarantine list (`dataserver lint`) whose samples are left out; empty for none."""
    caption: Name | None = None
    """Named caption (`dataserver index --caption`) that is read instead of each sample's own text. Samples without it
    are read with their own."""
    captions: Annotated[tuple[CaptionShare, ...], Field(min_length=2, max_length=32)] | None = None
    """Several captions instead of `caption`: each sample draws one of them anew in every epoch, by seed, epoch and
    sample. Samples without the drawn one are read with their own."""
    conversations: ConversationSpec | None = None
    """Samples are conversations (`dataserver index --conversations chat`), rendered by the tokenizer's chat template: a
    sequence has its tokens and no others, and only answers of assistants are targets."""
    documents: DocumentSpec | None = None
    """Samples that are longer than `seq_len`, or have more images, clips or videos than stated here, are split into
    several. By default the text of a longer sample is cut."""
    metadata_transforms: InstalledTransforms | None = None
    """Transforms of metadata, whose columns `filter` may name, and which may leave samples out. They run when the
    dataset is indexed (`dataserver index --transform`), each on the columns of the index."""
    text_transforms: InstalledTransforms | None = None
    """Transforms of texts, in this order, before texts become tokens. They run when tokens are counted (`dataserver
    index --transform`)."""
    transformed: Digest | None = None
    """Digest of the columns and token ids that these transforms made of the dataset; only with transforms. A server
    that has others refuses the job."""

    def pieces(self) -> tuple[WeightPiece, ...]:
        """The pieces of the weight, one where it never changes."""
        return (WeightPiece(from_step=0, weight=self.weight),) if isinstance(self.weight, str) else self.weight

    @model_validator(mode="after")
    def _check_weight(self) -> Self:
        for before, after in pairwise(self.pieces()):
            if before.from_step >= after.from_step:
                raise ValueError(
                    f"weight has a piece from step {after.from_step} behind one from step {before.from_step}; list "
                    "the pieces in ascending order, one for each step"
                )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.conversations is not None and (self.caption is not None or self.captions is not None):
            raise ValueError("conversations have no captions; leave caption and captions out")
        if self.conversations is not None and self.text_transforms is not None:
            raise ValueError("the texts of conversations are rendered by a template; leave text_transforms out")
        if self.documents is not None and (self.conversations is not None or self.captions is not None):
            raise ValueError(
                "documents are split once and for all, conversations by turns and drawn captions anew in each epoch; "
                "leave documents out, or conversations and captions"
            )
        if self.transformed is not None and not (self.metadata_transforms or self.text_transforms):
            raise ValueError("transformed is stated, and no transform of metadata or text; leave it out")
        if self.captions is None:
            return self
        if self.caption is not None:
            raise ValueError(f"caption is {self.caption!r} and captions has others; state one of the two")
        names = [caption.name for caption in self.captions]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"captions {twice} are named twice; every entry needs a name of its own")
        if all(Fraction(caption.weight) == 0 for caption in self.captions):
            raise ValueError("all weights of captions are 0; each must be positive")
        before, bound = Fraction(0), 0
        for caption, share in zip(self.captions, self.caption_shares(), strict=True):
            before, first = before + share, bound
            bound = int(before * 2**64)
            if bound == first:
                raise ValueError(
                    f"caption {caption.name!r} has the weight {caption.weight}, a share below the 2^-64 that keyed "
                    "draws tell apart; raise its weight, or leave it out"
                )
        return self

    def caption_shares(self) -> tuple[Fraction, ...]:
        """Share of each of `captions`, summing to one."""
        weights = [Fraction(caption.weight) for caption in self.captions or ()]
        total = sum(weights)
        return tuple(Fraction(weight, total) for weight in weights)


class TokenizerSpec(SpecModel):
    """The tokenizer of the text."""

    name: Name = "bytes"
    """Name of the tokenizer; `bytes` is the built-in byte-level vocabulary, which needs no file."""
    digest: Digest
    """SHA-256 of the tokenizer's file (for `bytes`: of its name and version)."""
    vocab_size: Positive
    """Number of token ids that the backbone must know, including special tokens."""
    bos: TokenId
    """First token of every sample."""
    eos: TokenId
    """Last token of a sample that is not generated; a target of the loss."""
    boi: TokenId
    """Stands before the embeddings, or the query tokens, of an image."""
    eoi: TokenId
    """Stands after the embeddings of an image."""
    image: TokenId
    """Stands where an image embedding replaces the token's own."""
    query: TokenId
    """Stands where a learned query replaces the token's own."""


SPECIAL_TOKENS: Final = ("bos", "eos", "boi", "eoi", "image", "query")
"""Fields of a tokenizer that name a token's id; by default the ids behind the vocabulary, in this order."""


class Packing(ItemBudget):
    """Whether several samples share a sequence, and how many images, clips and videos a sequence may have."""

    enabled: bool = True
    """False: one sample per sequence, and every step holds exactly `global_batch` samples."""
    fill: DecimalString = "0.97"
    """Planned share of `global_batch x seq_len` tokens of a step; ignored without packing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 < Fraction(self.fill) <= 1:
            raise ValueError(f"fill is {self.fill}; a value in (0, 1] is required")
        if not self.enabled and any(self.budget):
            raise ValueError(
                "packing is not enabled, and max_images, max_clips and max_videos count items of a packed sequence; "
                "leave them out, and state them under datasets[].documents"
            )
        return self


class Generation(SpecModel):
    """How often an image-text pair, or a document, trains the generator instead of being only read."""

    ratio: DecimalString = "0"
    """Probability that a pair trains the generator; with 0 no generator is needed, with 1 no encoder for pairs."""
    query_tokens: Annotated[int, Field(ge=1, le=65536)] = 64
    """Query tokens after the caption whose last hidden states condition the generator."""
    interleaved: bool | None = None
    """Whether samples other than pairs train the generator as well, with the same probability: one image of a document
    is the target, and the document before it is read. By default they are only read."""

    @field_validator("interleaved", mode="after")
    @classmethod
    def _only_if_so(cls, value: bool | None) -> bool | None:
        """A stream that generates pairs alone is the same whether it says so or not."""
        return value or None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if Fraction(self.ratio) > 1:
            raise ValueError(f"ratio is {self.ratio}; a probability in [0, 1] is required")
        if self.interleaved and Fraction(self.ratio) == 0:
            raise ValueError("interleaved is true, and ratio is 0: nothing is generated; raise ratio, or leave it out")
        return self


class Continuation(SpecModel):
    """The stream that another one continues, and where."""

    step: Positive
    """First step of the new stream; the earlier one ends before it."""
    stream: "Stream"
    """The earlier stream, complete, as checkpoints hold it."""
    epochs: Positive | None = None
    """`end.epochs` of the earlier job, if it ended before `step` and padded its last step (`end.last`): the samples for
    which that step had room were not read."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.step <= self.stream.first_step:
            raise ValueError(
                f"step is {self.step}, and the earlier stream begins with step {self.stream.first_step}; a later step "
                "is required"
            )
        if len(self.stream.earlier()) >= MAX_EARLIER:
            raise ValueError(f"more than {MAX_EARLIER} streams continue each other; begin a new one")
        return self


class Stream(SpecModel):
    """The part of a job that decides which samples a step holds, and what they look like."""

    datasets: Annotated[tuple[DatasetSpec, ...], Field(min_length=1, max_length=1024)]
    """The datasets that samples are drawn from, and their shares."""
    tokenizer: TokenizerSpec
    """Tokenizer and special token ids."""
    sizing: Sizing = Sizing.model_construct()
    """How images become patch grids."""
    transforms: Transforms | None = None
    """Random transforms of the pixels of every image, in this order, before it is scaled to its patch grid. The draws
    depend only on seed, dataset, epoch and sample."""
    seq_len: Annotated[int, Field(ge=8, le=2**22)]
    """Longest sequence in tokens; a longer sample's text is cut, its images never."""
    packing: Packing = Packing.model_construct()
    """How samples are packed into sequences."""
    global_batch: Annotated[int, Field(ge=1, le=2**20)]
    """Number of sequences in one step, over all ranks."""
    generation: Generation = Generation.model_construct()
    """Which samples train the generator."""
    contrastive_batch: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Number of image-text pairs in one contrastive batch, which are all compared in one loss; only for jobs of towers.
    A sample is then one image and its text. Both are required, even if no tower reads one of them."""
    shuffle_window: Annotated[int, Field(ge=1, le=4096)] = 8
    """Number of shards whose samples are mixed with each other. The shards themselves are permuted over the whole
    epoch."""
    seed: Natural = 0
    """Key of all randomness of the job."""
    order_version: Positive = 1
    """Version of the rules that turn (stream, step) into samples: 1 mixes one window of shards after the other; in 2
    the window slides, so that every step needs about as many bytes of new shards."""
    content_version: Positive = 2
    """Version of the rules that turn samples into bytes: decoding, resizing, tokenizing, tensor layout."""
    continues: Continuation | None = None
    """Earlier stream that this one continues with other weights, datasets or sizes. Datasets with the same name go on
    where the earlier stream stopped, and step numbers go on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [d.name for d in self.datasets]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"datasets {twice} are named twice; every entry needs a name of its own")
        self._check_weights()
        ids = self.tokenizer
        for field in SPECIAL_TOKENS:
            if getattr(ids, field) >= ids.vocab_size:
                raise ValueError(
                    f"tokenizer.{field} is {getattr(ids, field)}; it must lie below vocab_size {ids.vocab_size}"
                )
        if self.generation.query_tokens + 3 > self.seq_len and Fraction(self.generation.ratio) > 0:
            raise ValueError(
                f"{self.generation.query_tokens} query tokens and 3 more do not fit seq_len {self.seq_len}; "
                "raise seq_len or lower generation.query_tokens"
            )
        self._check_contrastive()
        self._check_conversations()
        self._check_documents()
        self._check_interleaved()
        self._check_tiles()
        return self

    def _check_documents(self) -> None:
        split = [spec for spec in self.datasets if spec.documents is not None]
        if self.contrastive_batch is not None and (split or any(self.packing.budget)):
            raise ValueError("towers see an image and its text; leave documents and the budgets of packing out")
        alone = [spec.name for spec in split if spec.documents is not None and spec.documents.together]
        if alone and not self.packing.enabled:
            raise ValueError(
                f"documents.together of dataset {alone[0]!r} asks for parts that share a sequence, and packing is not "
                "enabled; leave together out"
            )
        whole = [spec.name for spec in self.datasets if spec.documents is None]
        if whole and any(self.packing.budget):
            raise ValueError(
                f"packing has a budget of items, and samples of dataset {whole[0]!r} may have more of them: state "
                "documents for it, an empty mapping at least, so that such samples are split"
            )

    def _check_conversations(self) -> None:
        chats = [spec.name for spec in self.datasets if spec.conversations is not None]
        if chats and (self.contrastive_batch is not None or Fraction(self.generation.ratio) > 0):
            raise ValueError(
                f"the dataset {chats[0]!r} has conversations, which are understood alone: leave contrastive_batch out "
                f"and set generation.ratio, now {self.generation.ratio}, to 0"
            )

    def _check_interleaved(self) -> None:
        drawn = [spec.name for spec in self.datasets if spec.captions is not None]
        if drawn and self.generation.interleaved:
            raise ValueError(
                f"generation.interleaved reads a document up to an image, and captions of dataset {drawn[0]!r} are "
                "drawn anew in each epoch: leave one of them out, or name one caption"
            )

    def _check_tiles(self) -> None:
        if self.sizing.tiles is not None and Fraction(self.generation.ratio) > 0:
            raise ValueError(
                "sizing.rule tiles cuts images, and generators learn whole ones: set generation.ratio, now "
                f"{self.generation.ratio}, to 0, or take another rule"
            )
        if self.contrastive_batch is not None and (self.sizing.tiles or self.sizing.marks):
            raise ValueError(
                "towers see whole images, whose embeddings meet no tokens: leave sizing.tiles and sizing.marks out"
            )
        timestamps = None if self.sizing.video is None else self.sizing.video.timestamps
        if self.contrastive_batch is not None and timestamps is not None:
            raise ValueError(
                f"sizing.video.timestamps has the ids {[*timestamps.ids]}, and contrastive_batch is "
                f"{self.contrastive_batch}; towers see an image and its text, and no times of frames: leave "
                "sizing.video.timestamps out"
            )
        for name, of in (("sizing.marks", self.sizing.marks), ("sizing.video.timestamps", timestamps)):
            ids = () if of is None else of.ids
            if max(ids, default=0) >= self.tokenizer.vocab_size:
                raise ValueError(
                    f"{name} has the id {max(ids)}; ids must lie below vocab_size {self.tokenizer.vocab_size}"
                )

    def _check_contrastive(self) -> None:
        batch = self.contrastive_batch
        if batch is None:
            return
        if self.global_batch % batch or self.packing.enabled or Fraction(self.generation.ratio) > 0:
            raise ValueError(
                f"contrastive_batch {batch} with global_batch {self.global_batch}, packing.enabled "
                f"{self.packing.enabled}, generation.ratio {self.generation.ratio}; a multiple of it, false and 0 are "
                "required"
            )

    def _check_weights(self) -> None:
        late = [d.name for d in self.datasets if d.pieces()[0].from_step > self.first_step]
        if late:
            raise ValueError(
                f"datasets {late} have no weight at step {self.first_step}, the first; begin each list of pieces with "
                f"from_step {self.first_step}, with weight 0 where the dataset comes later"
            )
        streams = [self, *(before.stream for before in self.earlier())]
        found = sum(len(stream._changes()) * len(stream.datasets) for stream in streams)
        if found > MAX_SHARES:
            raise ValueError(
                f"the weights of {len(self.datasets)} datasets change at {len(self._changes())} steps, which makes "
                f"{found:,} weights with those of the streams that this one continues; {MAX_SHARES:,} weights in all "
                "are allowed: let datasets change at the same steps, or at fewer"
            )
        for step, weights in self.mixture():
            if not any(weight != "0" for weight in weights):
                raise ValueError(
                    f"all dataset weights are 0 from step {step} on; at least one must be positive in every step"
                )

    @property
    def first_step(self) -> int:
        """The first step of the stream."""
        return 0 if self.continues is None else self.continues.step

    def earlier(self) -> list[Continuation]:
        """The streams that this one continues, oldest first."""
        if self.continues is None:
            return []
        return [*self.continues.stream.earlier(), self.continues]

    def mixture(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield the first step and every later one from which a weight is another one, with all weights from there."""
        first, weights = self.first_step, [""] * len(self.datasets)
        changes = [
            (max(first, piece.from_step), dataset, piece.weight)
            for dataset, spec in enumerate(self.datasets)
            for piece in spec.pieces()
        ]
        changes.sort(key=itemgetter(0))  # of the pieces that end before the first step, the last one of each stays last
        for step, group in groupby(changes, key=itemgetter(0)):
            for _, dataset, weight in group:
                weights[dataset] = weight
            yield step, tuple(weights)

    def _changes(self) -> set[int]:
        """The steps that `mixture` yields."""
        lists = (spec.weight for spec in self.datasets if not isinstance(spec.weight, str))
        return {self.first_step, *(p.from_step for pieces in lists for p in pieces if p.from_step > self.first_step)}

    def weights_at(self, step: int) -> tuple[str, ...]:
        """The weight of each dataset in a step."""
        found = []
        for spec in self.datasets:
            pieces = spec.pieces()
            found.append(pieces[bisect_right(pieces, step, key=lambda piece: piece.from_step) - 1].weight)
        return tuple(found)
