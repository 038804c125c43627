"""The parts of a job's specification: its stream, its modules, and what layouts have in common.

A job (`dataserver.planning.job.spec`) is written as YAML or JSON, travels as JSON, and is identified by hashes of its
canonical JSON (`identity`). There is one definition, this one, from which `protos/disttrain/v1/job_spec.schema.json` is
generated for other languages. No floats: fractions are decimal strings, times are integers.
"""

from dataserver.planning.job.fields.audio import (
    HOP,
    LEAST_FRAMES,
    MAX_CLIP_SECONDS,
    SAMPLE_RATE,
    AudioSizing,
    clip_frames,
    clip_positions,
    clip_samples,
    served_frames,
)
from dataserver.planning.job.fields.cost import DEFAULT_COSTS, Cost, ModelCost, default_cost
from dataserver.planning.job.fields.end import End, LastStep
from dataserver.planning.job.fields.extremes import most_forward_ns, most_units
from dataserver.planning.job.fields.gradients import gradient_passes, with_backwards, without_backwards
from dataserver.planning.job.fields.hardware import (
    MODELS,
    PEAK_GIGAFLOPS,
    REDUCTION_NS,
    ModelSize,
    backward_percent,
    fixed_ns,
    linear_flops,
    pair_flops,
    peer_sums,
)
from dataserver.planning.job.fields.incomplete import FILLED_IN, absent_fields, json_pointer, value_at
from dataserver.planning.job.fields.layout import (
    BackboneOptions,
    ExecutionParts,
    ExtraInFlight,
    LayoutOptions,
    OrderPolicy,
    Schedule,
    WaveOptions,
)
from dataserver.planning.job.fields.modules import BalancePolicy, Memory, ModuleSpec, PackingPolicy, beside_sequences
from dataserver.planning.job.fields.plan_limits import PLAN_LIMITS, REMEDIES, SINGLE_STEP, Extreme, PlanLimits
from dataserver.planning.job.fields.problems import describe, required
from dataserver.planning.job.fields.sizing import MAX_ASPECT, Quality, Resampling, Sizing, SizingRule
from dataserver.planning.job.fields.stream import (
    SPECIAL_TOKENS,
    SUPPORTED_CONTENT_VERSIONS,
    SUPPORTED_ORDER_VERSIONS,
    ConversationSpec,
    CutAt,
    DatasetSpec,
    Stream,
    TokenizerSpec,
)
from dataserver.planning.job.fields.text import MAX_TEXT_BYTES, TextError, parse_json, parse_yaml
from dataserver.planning.job.fields.transfers import Transfer
from dataserver.planning.job.fields.transforms import HorizontalFlip, RandomResizedCrop
from dataserver.planning.job.fields.values import (
    MAX_INTEGER,
    DecimalString,
    Modality,
    ModuleKind,
    Name,
    Natural,
    Positive,
    SpecModel,
    is_name,
)

__all__ = [
    "DEFAULT_COSTS",
    "FILLED_IN",
    "HOP",
    "LEAST_FRAMES",
    "MAX_ASPECT",
    "MAX_CLIP_SECONDS",
    "MAX_INTEGER",
    "MAX_TEXT_BYTES",
    "MODELS",
    "PEAK_GIGAFLOPS",
    "PLAN_LIMITS",
    "REDUCTION_NS",
    "REMEDIES",
    "SAMPLE_RATE",
    "SINGLE_STEP",
    "SPECIAL_TOKENS",
    "SUPPORTED_CONTENT_VERSIONS",
    "SUPPORTED_ORDER_VERSIONS",
    "AudioSizing",
    "BackboneOptions",
    "BalancePolicy",
    "ConversationSpec",
    "Cost",
    "CutAt",
    "DatasetSpec",
    "DecimalString",
    "End",
    "ExecutionParts",
    "ExtraInFlight",
    "Extreme",
    "HorizontalFlip",
    "LastStep",
    "LayoutOptions",
    "Memory",
    "Modality",
    "ModelCost",
    "ModelSize",
    "ModuleKind",
    "ModuleSpec",
    "Name",
    "Natural",
    "OrderPolicy",
    "PackingPolicy",
    "PlanLimits",
    "Positive",
    "Quality",
    "RandomResizedCrop",
    "Resampling",
    "Schedule",
    "Sizing",
    "SizingRule",
    "SpecModel",
    "Stream",
    "TextError",
    "TokenizerSpec",
    "Transfer",
    "WaveOptions",
    "absent_fields",
    "backward_percent",
    "beside_sequences",
    "clip_frames",
    "clip_positions",
    "clip_samples",
    "default_cost",
    "describe",
    "fixed_ns",
    "gradient_passes",
    "is_name",
    "json_pointer",
    "linear_flops",
    "most_forward_ns",
    "most_units",
    "pair_flops",
    "parse_json",
    "parse_yaml",
    "peer_sums",
    "required",
    "served_frames",
    "value_at",
    "with_backwards",
    "without_backwards",
]
