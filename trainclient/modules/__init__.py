"""What a module of a job must fulfil to be trained, and the modules that come with the trainer."""

from trainclient.exchange.rows import Rows
from trainclient.models.contrastive import Half, ScoreRows
from trainclient.modules.protocol import Features, NoiseKey, Output, Site, Target, TrainedModule, View
from trainclient.modules.registry import Sizes, family_of, own, query_tokens, rows_of, sizes_of

__all__ = [
    "Features",
    "Half",
    "NoiseKey",
    "Output",
    "Rows",
    "ScoreRows",
    "Site",
    "Sizes",
    "Target",
    "TrainedModule",
    "View",
    "family_of",
    "own",
    "query_tokens",
    "rows_of",
    "sizes_of",
]
