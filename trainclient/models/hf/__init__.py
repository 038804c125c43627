"""Checkpoints in the layout of Hugging Face: `config.json` and safetensors, into our models and out of them."""

from trainclient.models.hf.adapters import export_adapter
from trainclient.models.hf.exporting import Usage, export_pretrained, tokenizer_files
from trainclient.models.hf.files import PretrainedError
from trainclient.models.hf.folder import Pretrained, load_into, load_pretrained
from trainclient.models.hf.processors import require_same_rule, sizing_note
from trainclient.models.hf.whole_export import TrainedPart, export_whole

__all__ = [
    "Pretrained",
    "PretrainedError",
    "TrainedPart",
    "Usage",
    "export_adapter",
    "export_pretrained",
    "export_whole",
    "load_into",
    "load_pretrained",
    "require_same_rule",
    "sizing_note",
    "tokenizer_files",
]
