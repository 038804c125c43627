"""Forward and backward of one chunk: rows in, the module, rows out; then their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dataserver.planning.job.fields import backward_percent
from dataserver.planning.simulation import Operation
from trainclient.client import Batch
from trainclient.exchange.point_to_point import Transfer
from trainclient.exchange.rows import RowCountError
from trainclient.exchange.sender_receiver import Buffer, Receiver, Sender
from trainclient.exchange.view_groups import SharedSequences
from trainclient.modules import Features, NoiseKey, Output, Site, Target, TrainedModule, View
from trainclient.program.clock import Clock
from trainclient.program.finite import FiniteNotes
from trainclient.program.interaction import Interaction


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Factors of the losses. Each loss is a mean over its planned targets of the step."""

    text: float = 1.0
    image: float = 1.0

    def of(self, target: Target) -> float:
        """The factor of one loss."""
        return {Target.TEXT: self.text, Target.IMAGE: self.image}[target]


def planned_targets(batch: Batch, target: Target) -> int:
    """The denominator of a loss: its targets in the whole step."""
    return {Target.TEXT: batch.text_tokens, Target.IMAGE: batch.target_patches}[target]


@dataclass(frozen=True, slots=True)
class Work:
    """What views ask of a module."""

    tokens: int = 0
    flops: int | None = 0
    """Floating-point operations, forward and backward; what is computed again does not count. None: not known."""

    def plus(self, more: "Work") -> "Work":
        """Return the work of both together."""
        known = self.flops is not None and more.flops is not None
        return Work(self.tokens + more.tokens, (self.flops or 0) + (more.flops or 0) if known else None)


@dataclass(frozen=True, slots=True, eq=False)
class PendingBackward:
    """A microbatch between forward and backward."""

    received: Transfer | None
    leaf: Tensor | None
    """Rows in, whose gradient goes back."""
    sent: Transfer | None
    rows: Tensor | None
    """Rows out, with their graph."""
    loss: Tensor | None
    """Weighted and divided by its denominator."""
    features: Features | None
    """Features of a tower's samples, with their graph."""


class ChunkRunner:
    """Runs one chunk of one process, and keeps the graphs of its microbatches from forward to backward."""

    def __init__(
        self,
        site: Site,
        module: TrainedModule,
        receiver: Receiver | None,
        sender: Sender | None,
        weights: LossWeights,
        clock: Clock,
        interaction: Interaction | None = None,
        shared: SharedSequences | None = None,
        buffers: Sequence[Buffer] = (),
    ) -> None:
        """Run a module between a receiver and a sender, where it has them.

        Args:
            site: what the module was made for.
            module: what computes.
            receiver: receives its rows.
            sender: sends its rows.
            weights: factors of the losses.
            clock: of the process.
            interaction: what makes a loss of features, where the module makes any.
            shared: the groups that this rank may share sequences in.
            buffers: what the exchanges of its program flush.
        """
        self.site = site
        self.module = module
        self.receiver = receiver
        self._frozen = bool(site.module.frozen)
        self._returns = site.module.runs_backward
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=module.device)
        """Sum of the chunk's loss over the targets of the step so far, without weight or denominator."""
        self.finite = FiniteNotes()
        """Where numbers stopped being finite in the step."""
        self.work = Work()
        """What the views of the step asked of the whole module that this chunk is of."""
        self._key = NoiseKey.of(site.job.stream)
        self._sender = sender
        self._weights = weights
        self._clock = clock
        self._interaction = interaction
        self._shared = shared
        self._exchanged = tuple(buffers)
        self._pending: dict[int, PendingBackward] = {}

    @property
    def sent_ns(self) -> int:
        """When all rows of its last operation that takes any were known to have been sent; of collectives 0."""
        return max((end.sent_ns for end in (self.receiver, self._sender) if end is not None), default=0)

    def begin_step(self) -> None:
        """Forget loss, notes and work of the step before."""
        self.loss_sum.zero_()
        self.finite.begin_step()
        self.work = Work()

    def post(self, edge: int, batch: Batch) -> None:
        """Begin to receive the rows of a microbatch over one of the edges into the chunk."""
        if self.receiver is not None:
            self.receiver.post(edge, batch, self.module.num_rows(self._view(batch)), self.site.width_in)

    def forward(self, operation: Operation, batch: Batch) -> None:
        """Run the forward pass of a microbatch, transfers included; without a graph where no backward follows."""
        view, received, leaf, rows = self._view(batch), None, None, None
        if self.receiver is not None:
            with torch.no_grad():
                view = replace(view, prepared=self.module.prepare(view))
            rows, received = self.receiver.receive(batch, self.module.num_rows(view), self.site.width_in)
            leaf = rows.values.requires_grad_(self.receiver.returns)
        self._count(view)
        with self._clock.running(operation), torch.set_grad_enabled(self._returns):
            try:
                output = self.module.forward(view, rows)
            except RowCountError as error:
                raise ValueError(f"in step {batch.step}, module {self.site.module.name} {error}") from error
        sent = self._send(batch, output)
        loss = self._loss(batch, output)
        made, features = None if output.rows is None else output.rows.values, output.features
        seen = made if features is None else features.values
        self.finite.forward(operation.microbatch, batch.items, leaf, [seen, output.loss_sum])
        if self._interaction is not None and features is not None:
            self._interaction.add(batch, features)
        if self._returns:
            self._pending[operation.microbatch] = PendingBackward(received, leaf, sent, made, loss, features)

    def exchange(self, operation: Operation) -> None:
        """Begin to send all ranks what was collected since the last exchange: rows, gradients or features.

        Raises:
            RankLostError: another process is gone.
        """
        with self._clock.running(operation):
            for buffer in self._exchanged:
                buffer.flush(operation.microbatch)

    def interact(self, operation: Operation) -> None:
        """Run an interaction with other processes, after the last forward that it takes features of.

        Raises:
            BrokerMismatchError: another process runs another step or plan.
            RankLostError: another process is gone.
        """
        if self._interaction is None:
            raise ValueError(f"module {self.site.module.name} makes no features; its program has an interaction")
        self.loss_sum += self._interaction.run(operation)

    def backward(self, operation: Operation) -> None:
        """Run its backward pass, transfers included."""
        pending = self._pending.pop(operation.microbatch)
        roots: list[tuple[Tensor, Tensor]] = []
        if self._sender is not None and pending.sent is not None and pending.rows is not None:
            roots.append((pending.rows, self._sender.gradient(pending.sent)))
        if pending.loss is not None:
            roots.append((pending.loss, torch.ones_like(pending.loss)))
        if self._interaction is not None and pending.features is not None:
            roots += self._interaction.roots(operation.microbatch, pending.features)
        if self._frozen:  # what does not depend on the rows in has no graph
            roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
        with self._clock.running(operation):
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        returned = None if pending.leaf is None else pending.leaf.grad
        self.finite.backward(operation.microbatch, [gradient for _, gradient in roots], returned)
        if (
            self.receiver is not None
            and self.receiver.returns
            and pending.received is not None
            and pending.leaf is not None
        ):
            self.receiver.give_back(pending.received, torch.zeros_like(pending.leaf) if returned is None else returned)

    def end_step(self) -> None:
        """Wait until all sends have completed."""
        if self.receiver is not None:
            self.receiver.end_step()
        if self._sender is not None:
            self._sender.end_step()

    def _view(self, batch: Batch) -> View:
        sequence_group = None if self._shared is None else self._shared.of(batch)
        return View(batch.tensors, batch.items, self._key, sequence_group)

    def _count(self, view: View) -> None:
        if view.sequence_group is not None and not view.sequence_group.is_leader:
            return
        forward = self.module.forward_flops(view)
        frozen = self._frozen or not self.module.trains_weights
        passes = self._returns and self.module.passes_gradients
        backward = backward_percent(frozen=frozen, input_gradient=passes, checkpoint=False)
        flops = None if forward is None else forward * (100 + backward) // 100
        self.work = self.work.plus(Work(self.module.num_tokens(view), flops))

    def _send(self, batch: Batch, output: Output) -> Transfer | None:
        """Send the rows; ValueError if the module made other rows than its targets take."""
        name, width, rows = self.site.module.name, self.site.row_width, output.rows
        if self._sender is None:
            if rows is not None and len(rows.values):
                raise ValueError(
                    f"module {name} made {len(rows.values)} rows in step {batch.step}, but feeds no other module; add "
                    "one that takes them, or return none"
                )
            return None
        if rows is None or rows.values.dim() != 2 or rows.values.shape[1] != width:
            found = "no rows" if rows is None else f"rows of shape {list(rows.values.shape)}"
            raise ValueError(f"module {name} made {found}; the modules behind it take rows of shape [any, {width}]")
        return self._sender.send(batch, rows)

    def _loss(self, batch: Batch, output: Output) -> Tensor | None:
        """What a microbatch adds to the loss of the step."""
        target = self.module.target
        if target is None or output.loss_sum is None:
            return None
        self.loss_sum += output.loss_sum.detach()
        return self._weights.of(target) * output.loss_sum / max(1, planned_targets(batch, target))
