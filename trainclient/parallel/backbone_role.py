"""The backbone's part of a step, for any stage of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainclient.client import Batch
from trainclient.models.backbone import IGNORED_LABEL, BackboneBatch, BackboneStage, StageOutput
from trainclient.parallel.batches import incoming, outgoing, stamp_of
from trainclient.parallel.broker import RowBlocks, receive_blocks, send_blocks
from trainclient.parallel.messages import Kind, Stamp
from trainclient.parallel.roles import Edge, Role

_SHARED = ("position_ids", "cu_lengths")
_FIRST = ("token_ids", "embedding_slots", "condition_slots")
_LAST = ("labels", "condition_slots")
_PEER = 0
"""Between stages the only peer is the same data-parallel rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a stage works on."""

    leaf: Tensor | None
    """Embeddings [E, width] on the first stage (None without an encoder), hidden states [T, width] elsewhere; their
    gradient goes back."""
    blocks: RowBlocks | None
    """Where embeddings came from."""
    sample_valid: Tensor
    """bool [S], CPU: True for samples known to be valid, those with images by what encoders say of them; the labels of
    the others are ignored, as those of generated samples are anyway."""


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A microbatch between forward and backward."""

    stamp: Stamp
    inputs: Inputs
    output: Tensor
    """Hidden states [T, width], or conditions [Q, width] on the last stage; with their graph."""
    blocks: RowBlocks | None
    """Where conditions went."""
    loss: Tensor | None
    """On the last stage, weighted and divided by its denominator."""


class BackboneRole(Role[Staged]):
    """Runs one stage of a backbone."""

    def __init__(
        self,
        name: str,
        stage: BackboneStage,
        device: torch.device,
        before: Edge | None,
        after: Edge | None,
        weight: float,
    ) -> None:
        super().__init__(stage, device, before, after)
        self._name = name
        self._stage = stage
        self._weight = weight

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that the role reads from its view."""
        own = (_FIRST if self._stage.is_first else ()) + (_LAST if self._stage.is_last else ())
        return tuple(dict.fromkeys(_SHARED + own))

    def _forward(self, batch: Batch) -> Staged:
        inputs = self._receive(batch)
        with self.forward_times.lap():
            output = self._run(batch, inputs)
        return self._send(batch, inputs, output)

    def _backward(self, kept: Staged) -> None:
        gradient = self._receive_gradient(kept)
        roots, gradients = [kept.output], [gradient]
        with self.backward_times.lap():
            if kept.loss is None:
                torch.autograd.backward(roots, gradients)
            else:
                torch.autograd.backward([*roots, kept.loss], [*gradients, torch.ones_like(kept.loss)])
        self._send_gradient(kept)

    def _receive(self, batch: Batch) -> Inputs:
        stamp, width = stamp_of(batch), self._stage.config.width
        valid = torch.from_numpy(batch.items.valid)
        if self._before is None:
            return Inputs(None, None, valid)
        if not self._stage.is_first:
            tokens = int(batch.tensors["cu_lengths"][-1])
            link = self._before.forward
            valid, hidden = link.receive(Kind.ACTIVATIONS, stamp, _PEER, len(valid), tokens, width)
            return Inputs(hidden.requires_grad_(), None, valid)
        slots = batch.tensors["embedding_slots"]
        blocks = incoming(batch, self._before.module, self._name)
        blocks.check(len(slots), len(self._before.forward.peers), "embeddings")
        rows, block_valid = receive_blocks(self._before.forward, Kind.EMBEDDINGS, stamp, blocks, len(slots), width)
        tokens_of_blocks = slots[torch.from_numpy(blocks.start)]
        samples = torch.searchsorted(batch.tensors["cu_lengths"], tokens_of_blocks, right=True) - 1
        valid[samples] = torch.from_numpy(~batch.items.invalid)[samples]
        valid[samples[~block_valid]] = False
        return Inputs(rows.requires_grad_(), blocks, valid)

    def _run(self, batch: Batch, inputs: Inputs) -> StageOutput:
        tensors, first = batch.tensors, self._stage.is_first
        labels = tensors.get("labels")
        if labels is not None:
            token_valid = inputs.sample_valid.repeat_interleave(tensors["cu_lengths"].diff())
            labels = labels.masked_fill(~token_valid, IGNORED_LABEL)
        view = BackboneBatch(
            cu_lengths=tensors["cu_lengths"],
            position_ids=tensors["position_ids"],
            token_ids=tensors.get("token_ids"),
            embedding_slots=tensors.get("embedding_slots"),
            condition_slots=tensors.get("condition_slots", torch.zeros(0, dtype=torch.int32)),
            labels=labels,
        )
        output: StageOutput = self._stage(
            view, embeddings=inputs.leaf if first else None, hidden=None if first else inputs.leaf
        )
        return output

    def _send(self, batch: Batch, inputs: Inputs, output: StageOutput) -> Staged:
        stamp, after = stamp_of(batch), self._after
        if output.hidden is not None:
            if after is not None:
                after.forward.send(Kind.ACTIVATIONS, stamp, _PEER, inputs.sample_valid, output.hidden.detach())
            return Staged(stamp, inputs, output.hidden, None, None)
        if output.conditions is None or output.loss_sum is None:
            raise TypeError("the last stage of a backbone returned neither hidden states nor conditions with a loss")
        self.loss_sum += output.loss_sum.detach()
        loss = self._weight * output.loss_sum / max(1, batch.text_tokens)
        blocks = None
        if after is not None:
            blocks = outgoing(batch, self._name, after.module)
            blocks.check(len(output.conditions), len(after.forward.peers), "conditions")
            valid = torch.ones(len(blocks.peer), dtype=torch.bool)
            send_blocks(after.forward, Kind.CONDITIONS, stamp, blocks, output.conditions.detach(), valid)
        return Staged(stamp, inputs, output.conditions, blocks, loss)

    def _receive_gradient(self, kept: Staged) -> Tensor:
        rows, width = kept.output.shape
        if self._after is None:
            return torch.zeros_like(kept.output)
        link = self._after.backward
        if kept.blocks is None:
            return link.receive(Kind.ACTIVATION_GRADIENTS, kept.stamp, _PEER, 0, rows, width)[1]
        return receive_blocks(link, Kind.CONDITION_GRADIENTS, kept.stamp, kept.blocks, rows, width)[0]

    def _send_gradient(self, kept: Staged) -> None:
        leaf, blocks = kept.inputs.leaf, kept.inputs.blocks
        if leaf is None or self._before is None:
            return
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        link = self._before.backward
        if blocks is None:
            link.send(Kind.ACTIVATION_GRADIENTS, kept.stamp, _PEER, torch.ones(0, dtype=torch.bool), gradient)
        else:
            valid = torch.ones(len(blocks.peer), dtype=torch.bool)
            send_blocks(link, Kind.EMBEDDING_GRADIENTS, kept.stamp, blocks, gradient, valid)
