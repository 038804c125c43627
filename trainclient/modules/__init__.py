"""What a module of a job must fulfil to be trained, and the modules that come with the trainer."""

from trainclient.exchange.rows import Rows
from trainclient.models.contrastive import Half, ScoreRows
from trainclient.modules.pretrained import WHAT, Sizes
from trainclient.modules.protocol import Features, NoiseKey, Output, Site, Target, TrainedModule, View
from trainclient.modules.registry import exported_as, family_of, own, parts_of_whole, rows_of

__all__ = [
    "WHAT",
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
    "exported_as",
    "family_of",
    "own",
    "parts_of_whole",
    "rows_of",
]
