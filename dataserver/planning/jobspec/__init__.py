"""The job specification: what a job trains on (its stream) and how it runs (its execution).

A JobSpec is written as YAML or JSON, travels as JSON, and is identified by hashes of its canonical JSON (`identity`).
There is one definition, this one; `protos/disttrain/v1/job_spec.schema.json` is generated from it for other languages.
No floats: fractions are decimal strings, times are integers.
"""

from dataserver.planning.jobspec.cost import DEFAULT_COSTS, Cost, ModelCost, default_cost
from dataserver.planning.jobspec.job import SUPPORTED_PLAN_VERSIONS, End, Execution, JobSpec, LastStep, ValidityPolicy
from dataserver.planning.jobspec.layouts import (
    ColocatedLayout,
    ContrastiveLayout,
    ContrastiveSchedule,
    Layout,
    OrderPolicy,
    PipelineLayout,
    Schedule,
)
from dataserver.planning.jobspec.modules import (
    BalancePolicy,
    Exchange,
    GroupPolicy,
    Memory,
    ModuleSpec,
    PackingPolicy,
    SequenceGroups,
)
from dataserver.planning.jobspec.stream import (
    SUPPORTED_CONTENT_VERSIONS,
    SUPPORTED_ORDER_VERSIONS,
    DatasetSpec,
    Generation,
    Packing,
    Sizing,
    Stream,
    TokenizerSpec,
)
from dataserver.planning.jobspec.values import MAX_INTEGER, Modality, ModuleKind, Name

__all__ = [
    "DEFAULT_COSTS",
    "MAX_INTEGER",
    "SUPPORTED_CONTENT_VERSIONS",
    "SUPPORTED_ORDER_VERSIONS",
    "SUPPORTED_PLAN_VERSIONS",
    "BalancePolicy",
    "ColocatedLayout",
    "ContrastiveLayout",
    "ContrastiveSchedule",
    "Cost",
    "DatasetSpec",
    "End",
    "Exchange",
    "Execution",
    "Generation",
    "GroupPolicy",
    "JobSpec",
    "LastStep",
    "Layout",
    "Memory",
    "Modality",
    "ModelCost",
    "ModuleKind",
    "ModuleSpec",
    "Name",
    "OrderPolicy",
    "Packing",
    "PackingPolicy",
    "PipelineLayout",
    "Schedule",
    "SequenceGroups",
    "Sizing",
    "Stream",
    "TokenizerSpec",
    "ValidityPolicy",
    "default_cost",
]
