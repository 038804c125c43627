"""Llama-style decoder over packed sequences, whole or as one stage of a pipeline."""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataserver.planning.job.fields import ModelSize
from trainclient.models.attention import HeadSharing, Segments
from trainclient.models.checks import checked_index, require_shape
from trainclient.models.layers import (
    RotaryScaling,
    Rotation,
    SelfAttention,
    SwiGlu,
    at_least_float32,
    require_heads,
    run_block,
)
from trainclient.upload import upload

IGNORED_LABEL = -100
NORM_EPS = 1e-5
MAX_LOGITS = 1 << 26
"""Logits alive at once in the loss: 256 MiB in float32."""


@dataclass(frozen=True, slots=True)
class BackboneConfig:
    """Sizes of a backbone."""

    layers: int
    width: int
    mlp_width: int
    heads: int
    groups: int
    """Key and value heads of grouped-query attention."""
    rotary_base: float
    vocab_size: int
    query_tokens: int
    """Learned query tokens for each generated image; 0 where the job generates none."""
    head_dim: int | None = None
    """Size of a head; by default width / heads."""
    norm_eps: float = NORM_EPS
    """Added to the mean square in all norms."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    output_bias: bool = False
    """Whether the outputs of attention have biases."""
    rotary_scaling: RotaryScaling | None = None
    """How the wave lengths of rotary positions are scaled, if at all."""
    positions: int = 0
    """Tokens of the longest sequence that its weights know, before all wave lengths are stretched alike (as
    `max_position_embeddings` counts them); 0: not said."""

    def __post_init__(self) -> None:
        require_heads("a backbone", self.width, self.heads, self.groups, axes=1, head_dim=self.head_dim)

    @property
    def size(self) -> ModelSize:
        """What operations and memory depend on."""
        return ModelSize(self.layers, self.width, self.mlp_width, self.heads, self.groups, self.vocab_size)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that its weights know; 0: not said."""
        scaling = self.rotary_scaling
        stretched = scaling is not None and not scaling.original_positions
        return int(self.positions * scaling.factor) if stretched and scaling is not None else self.positions

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim


@dataclass(frozen=True, slots=True, eq=False)
class BackboneBatch:
    """The tensors of a backbone view that stages read. They may lie on the CPU, where checking them is free.

    Where ranks share the tokens of all segments, T counts those of this rank, and slots are of these.
    """

    cu_lengths: Tensor
    """Integers [segments + 1]: no token attends to another segment's. Of all ranks together."""
    position_ids: Tensor
    """Integers [T]: position of each token in its sequence."""
    token_ids: Tensor | None
    """Integers [T]; only the first stage reads them."""
    embedding_slots: Tensor | None
    """Integers [E], the rows that hold image embeddings; only the first stage reads them."""
    condition_slots: Tensor
    """Integers [images * query_tokens], the rows of the query tokens; the first and the last stage read them."""
    labels: Tensor | None
    """Integers [T], already shifted, -100 is ignored; only the last stage reads them."""
    query_ids: Tensor | None = None
    """Integers, which query token stands in each of the `condition_slots`; without it, all of each image in turn."""
    sharing: HeadSharing | None = None
    """Who has the tokens, where several ranks share them."""


@dataclass(frozen=True, slots=True, eq=False)
class StageOutput:
    """What a stage passes on: `hidden` to the next stage, or from the last stage `conditions` and `loss_sum`."""

    hidden: Tensor | None
    """[T, width]: what the last block returns."""
    conditions: Tensor | None
    """[images * query_tokens, width], for the generator."""
    loss_sum: Tensor | None
    """Scalar, at least float32: the sum (not the mean) of the cross entropies of all labelled tokens."""


class BackboneBlock(nn.Module):
    """Pre-norm Llama block (arXiv 2302.13971, section 2.2)."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = SelfAttention(
            config.width,
            config.heads,
            config.groups,
            bias=config.qkv_bias,
            causal=True,
            output_bias=config.output_bias,
            head_dim=config.head_size,
        )
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGlu(config.width, config.mlp_width)

    def forward(self, x: Tensor, segments: Segments, rotation: Rotation) -> Tensor:
        """[T, width] -> [T, width]."""
        x = x + self.attention(self.attention_norm(x), segments, rotation)
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))


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
    stage, `norm` and `head` on the last), so a checkpoint does not depend on the number of stages.
    """

    def __init__(
        self, config: BackboneConfig, stage: int = 0, num_stages: int = 1, *, checkpoint: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        numbers = stage_layers(config.layers, stage, num_stages)
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.layers = nn.ModuleDict({str(number): BackboneBlock(config) for number in numbers})
        if self.is_first:
            self.embed = nn.Embedding(config.vocab_size, config.width)
            if config.query_tokens:
                self.query = nn.Embedding(config.query_tokens, config.width)
        if self.is_last:
            self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)

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
            embeddings: [E, width] from the encoder, for the first stage; None where the view holds no image.
            text: what `embed_text` made of the batch, if it did before; its graph is made here.

        Returns:
            The hidden states, or from the last stage the conditions and the loss.

        Raises:
            ValueError: the tensors do not agree with each other or with the config.
        """
        if self.is_first == (hidden is not None):
            raise ValueError("the first stage takes no hidden states, and every other stage needs them")
        x = self._embed(batch, embeddings, text) if hidden is None else hidden
        x = self._run_layers(x, batch)
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
        device = x.device
        slots = checked_index("embedding_slots", batch.embedding_slots, len(x), device)
        if embeddings is None:
            embeddings = x.new_zeros(0, self.config.width)
        require_shape("embeddings", embeddings, len(slots), self.config.width)
        x = x.index_copy(0, slots, embeddings.to(x))
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

    def _run_layers(self, x: Tensor, batch: BackboneBatch) -> Tensor:
        config = self.config
        require_shape("hidden", x, -1, config.width)
        require_shape("position_ids", batch.position_ids, len(x))
        num_rows = len(x) if batch.sharing is None else batch.sharing.num_rows
        segments = Segments.from_offsets("cu_lengths", batch.cu_lengths, num_rows, x.device, batch.sharing)
        positions = upload(batch.position_ids, x.device)[:, None]
        rotation = Rotation.of(positions, config.head_size, config.rotary_base, x.dtype, config.rotary_scaling)
        for layer in self.layers.values():
            x = run_block(layer, x, segments, rotation, checkpoint=self.checkpoint)
        return x

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
        return token_loss(x.index_select(0, upload(rows, x.device)), targets, self.head.weight)


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
