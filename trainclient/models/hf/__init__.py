"""Checkpoints in the layout of Hugging Face: `config.json` and safetensors, into our models and out of them."""

from trainclient.models.hf.adapters import export_adapter
from trainclient.models.hf.exporting import Usage, export_pretrained
from trainclient.models.hf.files import PretrainedError
from trainclient.models.hf.folder import Pretrained, load_into, load_pretrained

__all__ = [
    "Pretrained",
    "PretrainedError",
    "Usage",
    "export_adapter",
    "export_pretrained",
    "load_into",
    "load_pretrained",
]
