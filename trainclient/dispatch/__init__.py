"""A dispatcher for trainers with loaders of their own: balances mini-batches that are already sampled (OrchMLLM).

    dispatcher = Dispatcher()
    lengths = dispatcher.gather([len(item) for item in items])        # of all ranks, a few bytes each
    images = arrange(lengths, policy="search", ranks_per_node=8)  # which rank works on which item
    mine = dispatcher.move(pixels, lengths, to=images)
    embeddings = dispatcher.move(encoder(mine), lengths, source=images)  # back to where their items came from

Moving items between ranks changes no sum of gradients, so the step stays the same. OrchMLLM: arXiv 2503.23830.
"""

from trainclient.dispatch.arrangement import Arrangement, arrange
from trainclient.dispatch.dispatcher import Dispatcher

__all__ = ["Arrangement", "Dispatcher", "arrange"]
