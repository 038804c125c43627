"""Where the metrics of a run go. The file of JSON lines is the truth; everything else shows what stands in it."""

from trainclient.training.sinks.lines import JsonLines, MetricsError, bytes_before
from trainclient.training.sinks.screen import Screen
from trainclient.training.sinks.tensorboard import TensorBoard, require_tensorboard
from trainclient.training.sinks.weights_and_biases import WeightsAndBiases, require_wandb
from trainclient.training.sinks.writer import MetricsWriter, Sink, SinkLostError

__all__ = [
    "JsonLines",
    "MetricsError",
    "MetricsWriter",
    "Screen",
    "Sink",
    "SinkLostError",
    "TensorBoard",
    "WeightsAndBiases",
    "bytes_before",
    "require_tensorboard",
    "require_wandb",
]
