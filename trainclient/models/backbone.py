"""Llama-style decoder over packed sequences, whole or as one stage of a pipeline."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainclient.models.attention import HeadSharing, Segments
from trainclient.models.backbone_block import BackboneBlock, BackboneConfig
from trainclient.models.checks import checked_index, require_shape
from trainclient.models.layers import run_block
from trainclient.models.norms import OffsetNorm, RmsNorm
from trainclient.models.rotary import Rotation, at_least_float32
from trainclient.upload import upload

IGNORED_LABEL = -100
MAX_LOGITS = 1 << 26
"""Logits alive at once in the loss: 256 MiB in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class BackboneBatch:
    """The tensors of a backbone view that stages read. They may lie on the CPU, where checking them is free.

    Where ranks share the tokens of all segments, T counts those of this rank, and slots are of these.
    """

    cu_lengths: Tensor
    """Integers [segments + 1]: no token attends to another segment's. Of all ranks together."""
    position_ids: Tensor
    """Integers [T]: position of each token in its sequence; with m-rope [3, T], in time, height and width."""
    token_ids: Tensor | None
    """Integers [T]; only the first stage reads them."""
    embedding_slots: Tensor | None
    """Integers [E], the rows that hold image embeddings; only the first stage reads them, and where the tokens of an
    image see each other both ways, all."""
    condition_slots: Tensor
    """Integers [images * query_tokens], the rows of the query tokens; the first and the last stage read them."""
    labels: Tensor | None
    """Integers [T], already shifted, -100 is ignored; only the last stage reads them."""
    query_ids: Tensor | None = None
    """Integers, which query token stands in each of the `condition_slots`; without it, all of each image in turn."""
    sharing: HeadSharing | None = None
    """Who has the tokens, where several ranks share them."""
    image_blocks: Tensor | None = None
    """Integers, of the tokens of all ranks together: the image of each, -1 for text. Only read where the tokens of an
    image see each other both ways."""


@dataclass(frozen=True, slots=True, eq=False)
class StageOutput:
    """What a stage passes on: `hidden` to the next stage, or from the last stage `conditions` and `loss_sum`."""

    hidden: Tensor | None
    """[T, width]: what the last block returns."""
    conditions: Tensor | None
    """[images * query_tokens, width], for the generator."""
    loss_sum: Tensor | None
    """Scalar, at least float32: the sum (not the mean) of the cross entropies of all labelled tokens."""


def stage_layers(layers: int, stage: int, num_stages: int) -> range:
    """Numbers of the layers that a pipeline stage holds: even shares, the smaller ones first.

    Raises:
        ValueError: the stage does not exist, or there are more stages than layers.
    """
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage is {stage}; with {num_stages} stages it must lie in [0, {num_stages})")
    if num_stages > layers:
        raise ValueError(f"{layers} layers cannot be split into {num_stages} stages; lower pp to at most {layers}")
    return range(stage * layers // num_stages, (stage + 1) * layers // num_stages)


class BackboneStage(nn.Module):
    """Some consecutive layers of the decoder; with one stage, all of it.

    Parameters have the names of the whole model (`layers.<number in the model>`; `embed` and `query` on the first
    stage, `norm` and `head` on the last), so a checkpoint does not depend on the number of stages. Where the head is
    the embedding, both stages have `embed`, and whoever trains them sees to it that they stay alike.
    """

    beside_adapters: ClassVar[tuple[str, ...]] = ("query.",)
    """Beginnings of the names of what is trained whole where blocks have adapters (`lora.adapt`)."""

    def __init__(
        self, config: BackboneConfig, stage: int = 0, num_stages: int = 1, *, checkpoint: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        numbers = stage_layers(config.layers, stage, num_stages)
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        _require_deepstack(config, num_stages)
        self.layers = nn.ModuleDict({str(number): BackboneBlock(config, number) for number in numbers})
        if self.is_first or (self.is_last and config.tied):
            self.embed = nn.Embedding(config.vocab_size, config.width)
        if self.is_first and config.query_tokens:
            self.query = nn.Embedding(config.query_tokens, config.width)
        if self.is_last:
            self.norm = (OffsetNorm if config.offset_norms else RmsNorm)(config.width, config.norm_eps)
            if not config.tied:
                self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, width], in the last stage."""
        return self.embed.weight if self.config.tied else self.head.weight

    def embed_text(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, width] of integers [T], in the first stage: all that it does before it needs images."""
        found: Tensor = self.embed(
            checked_index("token_ids", token_ids, self.config.vocab_size, self.embed.weight.device)
        )
        return found

    def forward(
        self,
        batch: BackboneBatch,
        *,
        hidden: Tensor | None = None,
        embeddings: Tensor | None = None,
        text: Tensor | None = None,
    ) -> StageOutput:
        """Run the stage.

        Args:
            batch: the view.
            hidden: [T, width] from the stage before; the first stage takes none.
            embeddings: [E, image_width] from the encoder, for the first stage; None where the view holds no image.
            text: what `embed_text` made of the batch, if it did before; its graph is made here.

        Returns:
            The hidden states, or from the last stage the conditions and the loss.

        Raises:
            ValueError: the tensors do not agree with each other or with the config.
        """
        if self.is_first == (hidden is not None):
            raise ValueError("the first stage takes no hidden states, and every other stage needs them")
        x = self._embed(batch, embeddings, text) if hidden is None else hidden
        x = self._run_layers(x, batch, embeddings)
        if not self.is_last:
            return StageOutput(x, None, None)
        x = self.norm(x)
        slots = self._checked_condition_slots(batch, x)
        return StageOutput(None, x.index_select(0, slots), self._loss(x, batch.labels))

    def _embed(self, batch: BackboneBatch, embeddings: Tensor | None, text: Tensor | None) -> Tensor:
        """Token embeddings, with those of images and queries in their slots."""
        if batch.token_ids is None or batch.embedding_slots is None:
            raise ValueError("the first stage needs token_ids and embedding_slots; request them in the view")
        x = self.embed_text(batch.token_ids) if text is None else self._followed(text, batch.token_ids)
        device, config = x.device, self.config
        if config.embed_scale:
            x = x * torch.tensor(config.embed_scale, dtype=x.dtype)
        slots = checked_index("embedding_slots", batch.embedding_slots, len(x), device)
        if embeddings is None:
            embeddings = x.new_zeros(0, config.image_width)
        require_shape("embeddings", embeddings, len(slots), config.image_width)
        x = x.index_copy(0, slots, embeddings[:, : config.width].to(x))
        condition_slots = self._checked_condition_slots(batch, x)
        if not self.config.query_tokens:
            return x
        if batch.query_ids is not None:
            return x.index_copy(0, condition_slots, self.query(upload(batch.query_ids, device)))
        images = len(condition_slots) // self.config.query_tokens
        return x.index_copy(0, condition_slots, self.query.weight.repeat(images, 1))

    def _followed(self, text: Tensor, token_ids: Tensor) -> Tensor:
        """Embeddings that were looked up before, as if it were now: gradients go to the parameter as it is here."""
        index = upload(token_ids, text.device, torch.int64)
        found: Tensor = _LookedUp.apply(self.embed.weight, index, text)  # type: ignore[no-untyped-call]
        return found

    def _run_layers(self, x: Tensor, batch: BackboneBatch, embeddings: Tensor | None = None) -> Tensor:
        config = self.config
        require_shape("hidden", x, -1, config.width)
        num_rows = len(x) if batch.sharing is None else batch.sharing.num_rows
        segments = Segments.from_offsets("cu_lengths", batch.cu_lengths, num_rows, x.device, batch.sharing)
        if config.two_way_images and batch.image_blocks is not None:
            require_shape("image_blocks", batch.image_blocks, num_rows)
            segments.blocks = upload(batch.image_blocks, x.device)
        rotation, windowed = self._rotations(x, batch)
        for number, layer in self.layers.items():
            turn = windowed if config.window_of(int(number)) else rotation
            x = run_block(layer, x, segments, turn, checkpoint=self.checkpoint)
            if embeddings is not None and int(number) < config.deepstack and batch.embedding_slots is not None:
                added = embeddings[:, (int(number) + 1) * config.width :][:, : config.width]
                x = x.index_add(0, upload(batch.embedding_slots, x.device, torch.int64), added.to(x))
        return x

    def _rotations(self, x: Tensor, batch: BackboneBatch) -> tuple[Rotation, Rotation]:
        """Rotations of layers that see whole sequences, and of windowed ones."""
        config, scaling = self.config, self.config.rotary_scaling
        if config.sections is not None:
            require_shape("position_ids", batch.position_ids, 3, len(x))
            axes = upload(batch.position_ids, x.device).T
            return (Rotation.in_sections(axes, config.sections, config.rotary_base, x.dtype, scaling),) * 2
        require_shape("position_ids", batch.position_ids, len(x))
        positions = upload(batch.position_ids, x.device)[:, None]
        rotation = Rotation.of(positions, config.head_size, config.rotary_base, x.dtype, scaling)
        if not config.windowed_rotary_base:
            return rotation, rotation
        return rotation, Rotation.of(positions, config.head_size, config.windowed_rotary_base, x.dtype)

    def _checked_condition_slots(self, batch: BackboneBatch, x: Tensor) -> Tensor:
        slots = checked_index("condition_slots", batch.condition_slots, len(x), x.device)
        queries = self.config.query_tokens
        if (len(slots) % queries if queries else len(slots)) and batch.query_ids is None:
            raise ValueError(
                f"condition_slots has {len(slots)} entries; the backbone has {queries} query tokens for each image, so "
                "a multiple of that is required"
            )
        return slots

    def _loss(self, x: Tensor, labels: Tensor | None) -> Tensor:
        if labels is None:
            raise ValueError("the last stage needs labels; request them in the view")
        require_shape("labels", labels, len(x))
        rows = (labels != IGNORED_LABEL).nonzero().squeeze(1)
        targets = checked_index("labels", labels[rows], self.config.vocab_size, x.device)
        return token_loss(x.index_select(0, upload(rows, x.device)), targets, self.head_weight)


def _require_deepstack(config: BackboneConfig, num_stages: int) -> None:
    """Raise ValueError unless the first stage has all layers behind which rows of images are added."""
    if config.deepstack > config.layers // num_stages:
        raise ValueError(
            f"rows of images are added behind the first {config.deepstack} layers (deepstack), and of {num_stages} "
            f"stages the first has {config.layers // num_stages} layers; set pp so that it has at least "
            f"{config.deepstack}"
        )


class _LookedUp(torch.autograd.Function):
    """Rows of a table that are known; what it makes of gradients is what an embedding does."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        """[vocab_size, width], int64 [T], [T, width] -> [T, width]."""
        ctx.save_for_backward(index)
        ctx.size = len(weight)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """[T, width] -> [vocab_size, width]."""
        (index,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(gradients[0], index, ctx.size, -1, False), None, None


def token_loss(hidden: Tensor, targets: Tensor, weight: Tensor, max_logits: int = MAX_LOGITS) -> Tensor:
    """Sum of the cross entropies of next tokens, in at least float32.

    Computed in chunks whose logits are computed again in the backward pass, so at most `max_logits` of them live.

    Args:
        hidden: [n, width].
        targets: int64 [n].
        weight: [vocab_size, width], the head.
        max_logits: bound of the logits of one chunk (at least one row).

    Returns:
        Scalar.
    """
    rows = max(1, max_logits // weight.shape[0])
    checkpoint = len(hidden) > rows
    chunks = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    losses = [run_block(_chunk_loss, h, t, weight, checkpoint=checkpoint) for h, t in chunks]
    return torch.stack(losses).sum()


def _chunk_loss(hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(at_least_float32(logits.dtype)), targets, reduction="sum")
