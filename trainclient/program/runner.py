"""Forward and backward of one chunk: rows in, the module, rows out; then their gradients the other way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dataserver.planning.job.fields import backward_percent
from dataserver.planning.simulation import Operation
from trainclient.client import Batch
from trainclient.exchange.grouped import SharedSequences
from trainclient.exchange.pipelined import Shipment
from trainclient.exchange.sides import Collecting, Entry, Exit
from trainclient.modules import Features, NoiseKey, Output, Site, Target, TrainedModule, View
from trainclient.program.clock import Clock
from trainclient.program.contrastive import Interaction
from trainclient.program.finite import FiniteNotes


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Factors of the losses, each of which is a mean over its planned targets of the step."""

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
        """Both together."""
        known = self.flops is not None and more.flops is not None
        return Work(self.tokens + more.tokens, (self.flops or 0) + (more.flops or 0) if known else None)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A microbatch between forward and backward."""

    received: Shipment | None
    leaf: Tensor | None
    """Rows in, whose gradient goes back."""
    sent: Shipment | None
    rows: Tensor | None
    """Rows out, with their graph."""
    loss: Tensor | None
    """Weighted and divided by its denominator."""
    features: Features | None
    """Of a tower's samples, with their graph."""


class ChunkRunner:
    """Runs one chunk of one process, and keeps the graphs of its microbatches from forward to backward."""

    def __init__(
        self,
        site: Site,
        module: TrainedModule,
        inlet: Entry | None,
        outlet: Exit | None,
        weights: LossWeights,
        clock: Clock,
        interaction: Interaction | None = None,
        shared: SharedSequences | None = None,
        exchanged: Sequence[Collecting] = (),
    ) -> None:
        """Run a module between an inlet, which a chunk that others feed has, and an outlet.

        Args:
            site: what the module was made for.
            module: what computes.
            inlet: where its rows arrive.
            outlet: where its rows leave.
            weights: factors of the losses.
            clock: of the process.
            interaction: what makes a loss of features, where the module makes any.
            shared: with whom this rank may share sequences, if with anyone.
            exchanged: what leaves by the exchanges of its program.
        """
        self.site = site
        self.module = module
        self.inlet = inlet
        self._frozen = bool(site.module.frozen)
        self._returns = site.module.runs_backward
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=module.device)
        """Sum of the chunk's loss over the targets of the step so far, without weight or denominator."""
        self.finite = FiniteNotes()
        """Where numbers stopped being finite in the step."""
        self.work = Work()
        """What the views of the step asked of the whole module that this chunk is of."""
        self._key = NoiseKey.of(site.job.stream)
        self._outlet = outlet
        self._weights = weights
        self._clock = clock
        self._interaction = interaction
        self._shared = shared
        self._exchanged = tuple(exchanged)
        self._kept: dict[int, Kept] = {}

    @property
    def stamped_ns(self) -> int:
        """When all rows of its last operation that takes any were known to have been sent; of collectives 0."""
        return max((end.stamped_ns for end in (self.inlet, self._outlet) if end is not None), default=0)

    def begin_step(self) -> None:
        """Forget the step before."""
        self.loss_sum.zero_()
        self.finite.begin_step()
        self.work = Work()

    def post(self, way: int, batch: Batch) -> None:
        """Begin to receive the rows of a microbatch over one of the ways into the chunk."""
        if self.inlet is not None:
            self.inlet.post(way, batch, self.module.num_rows(self._view(batch)), self.site.row_width)

    def forward(self, operation: Operation, batch: Batch) -> None:
        """Run the forward pass of a microbatch, transfers included; without a graph where no backward follows."""
        view, received, leaf, rows = self._view(batch), None, None, None
        if self.inlet is not None:
            with torch.no_grad():
                view = replace(view, prepared=self.module.prepare(view))
            rows, received = self.inlet.receive(batch, self.module.num_rows(view), self.site.row_width)
            leaf = rows.values.requires_grad_(self.inlet.returns)
        self._count(view)
        with self._clock.running(operation), torch.set_grad_enabled(self._returns):
            output = self.module.forward(view, rows)
        sent = self._send(batch, output)
        loss = self._loss(batch, output)
        made, features = None if output.rows is None else output.rows.values, output.features
        seen = made if features is None else features.values
        self.finite.forward(operation.microbatch, batch.items, leaf, [seen, output.loss_sum])
        if self._interaction is not None and features is not None:
            self._interaction.add(batch, features)
        if self._returns:
            self._kept[operation.microbatch] = Kept(received, leaf, sent, made, loss, features)

    def exchange(self, operation: Operation) -> None:
        """Begin to hand all ranks what was collected since the last exchange: rows, gradients or features.

        Raises:
            PeerLostError: another process is gone.
        """
        with self._clock.running(operation):
            for collecting in self._exchanged:
                collecting.depart(operation.microbatch)

    def interact(self, operation: Operation) -> None:
        """Run the interaction of a contrastive batch with all other towers, after its last forward.

        Raises:
            BrokerMismatchError: another process runs something else.
            PeerLostError: another process is gone.
        """
        if self._interaction is None:
            raise ValueError(f"module {self.site.module.name} makes no features; its program has an interaction")
        self.loss_sum += self._interaction.run(operation)

    def backward(self, operation: Operation) -> None:
        """Run its backward pass, transfers included."""
        kept = self._kept.pop(operation.microbatch)
        roots: list[tuple[Tensor, Tensor]] = []
        if self._outlet is not None and kept.sent is not None and kept.rows is not None:
            roots.append((kept.rows, self._outlet.gradient(kept.sent)))
        if kept.loss is not None:
            roots.append((kept.loss, torch.ones_like(kept.loss)))
        if self._interaction is not None and kept.features is not None:
            roots += self._interaction.roots(operation.microbatch, kept.features)
        if self._frozen:  # what does not depend on the rows in has no graph
            roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
        with self._clock.running(operation):
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        returned = None if kept.leaf is None else kept.leaf.grad
        self.finite.backward(operation.microbatch, [gradient for _, gradient in roots], returned)
        if self.inlet is not None and self.inlet.returns and kept.received is not None and kept.leaf is not None:
            self.inlet.give_back(kept.received, torch.zeros_like(kept.leaf) if returned is None else returned)

    def end_step(self) -> None:
        """Wait until all that was sent has left."""
        if self.inlet is not None:
            self.inlet.end_step()
        if self._outlet is not None:
            self._outlet.end_step()

    def _view(self, batch: Batch) -> View:
        sharers = None if self._shared is None else self._shared.of(batch)
        return View(batch.tensors, batch.items, self._key, sharers)

    def _count(self, view: View) -> None:
        if view.sharers is not None and not view.sharers.leads:
            return
        forward = self.module.forward_flops(view)
        frozen = self._frozen or not self.module.trains_weights
        backward = backward_percent(frozen=frozen, input_gradient=self._returns, checkpoint=False)
        flops = None if forward is None else forward * (100 + backward) // 100
        self.work = self.work.plus(Work(self.module.num_tokens(view), flops))

    def _send(self, batch: Batch, output: Output) -> Shipment | None:
        """Hand the rows on; ValueError if the module made other rows than its place asks for."""
        name, width, rows = self.site.module.name, self.site.row_width, output.rows
        if self._outlet is None:
            if rows is not None and len(rows.values):
                raise ValueError(
                    f"module {name} made {len(rows.values)} rows in step {batch.step}, but feeds no other module; add "
                    "one that takes them, or return none"
                )
            return None
        if rows is None or rows.values.dim() != 2 or rows.values.shape[1] != width:
            found = "no rows" if rows is None else f"rows of shape {list(rows.values.shape)}"
            raise ValueError(f"module {name} made {found}; the modules behind it take rows of shape [any, {width}]")
        return self._outlet.send(batch, rows)

    def _loss(self, batch: Batch, output: Output) -> Tensor | None:
        """What a microbatch adds to the loss of the step."""
        target = self.module.target
        if target is None or output.loss_sum is None:
            return None
        self.loss_sum += output.loss_sum.detach()
        return self._weights.of(target) * output.loss_sum / max(1, planned_targets(batch, target))
