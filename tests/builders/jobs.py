"""Jobs as data: the one place where tests put them together."""

import copy
from collections.abc import Iterator
from typing import Any, get_args

from dataserver.planning.job.fields import DEFAULT_COSTS, MODELS, BalancePolicy, ModuleKind
from dataserver.planning.job.identity import Job, identify, parse_job
from dataserver.planning.job.spec import AnyLayout, Execution

Data = dict[str, Any]

BALANCES = [p for p in BalancePolicy if p is not BalancePolicy.EVEN]
"""Those of all modules; `even` is for images."""

LAYOUT_KINDS = tuple(get_args(o.model_fields["kind"].annotation)[0] for o in get_args(AnyLayout))

TOKENIZER = {
    "name": "bytes",
    "digest": "1" * 64,
    "vocab_size": 300,
    "bos": 256,
    "eos": 257,
    "boi": 258,
    "eoi": 259,
    "image": 260,
    "query": 261,
}

MEMORY = {"budget_bytes": 10_000_000, "unit_bytes": 10}


def dataset(name: str = "laion", **changes: Any) -> Data:
    return {"name": name, "fingerprint": "0" * 64, **changes}


TWO_DATASETS = [dataset(name) for name in ("laion", "x")]
"""Of a mixture."""


def module(kind: str, name: str = "", **fields: Any) -> Data:
    """A module, named after its kind unless told otherwise; with a cost of its own, which no release changes."""
    named = {"name": name or {"encoder": "vit", "backbone": "llm", "generator": "dit"}[kind], "kind": kind}
    return {**named, "cost": usual_cost(kind, fields.get("tp", 1) * fields.get("sp", 1)), **fields}


def usual_cost(kind: str, degree: int = 1) -> Data:
    """The default model on the default device at 40 % of its peak, with 10 us a layer of each microbatch."""
    default = DEFAULT_COSTS[ModuleKind(kind)]
    found = default.forward_fields_of(ModuleKind(kind), degree)
    return found | {"microbatch_ns": 10_000 * MODELS[kind][default.model].layers}


def compose(modules: list[Data], **fields: Any) -> Data:
    """A job of ten steps over `pairs` as people write it, which servers fill in.

    Args:
        modules: of the job.
        fields: other fields, each of the execution if that has such a field, or else of the stream.
    """
    stream: Data = {"datasets": [{"name": "pairs"}]}
    execution: Data = {"modules": modules, "end": {"steps": 10}}
    for name, value in fields.items():
        (execution if name in Execution.model_fields else stream)[name] = value
    return {"stream": stream, "execution": execution}


def compose_whole(modules: list[Data], **fields: Any) -> Data:
    """`compose` with what a server would fill in: a fingerprint and a tokenizer."""
    return compose(modules, **{"datasets": [dataset()], "tokenizer": TOKENIZER, **fields})


def job_data(
    *,
    stream: Data | None = None,
    execution: Data | None = None,
    encoder: int = 1,
    backbone: tuple[int, int] = (1, 1),
    generator: int = 0,
    balance: str | None = None,
) -> Data:
    """A whole job: degrees of its modules (dp; dp and pp for the backbone; 0 leaves one out), their balance, and
    changed fields."""
    modules = [module("backbone", dp=backbone[0], pp=backbone[1])]
    if encoder:
        modules.insert(0, module("encoder", dp=encoder))
    if generator:
        modules.append(module("generator", dp=generator))
    if balance is not None:
        modules = [{**m, "balance": balance} for m in modules]
    fields = {"modules": modules, "seq_len": 512, "global_batch": backbone[0], **(stream or {}), **(execution or {})}
    return compose_whole(**fields)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf of a JSON value with its path."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    copied = copy.deepcopy(data)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


def make_job(**arguments: Any) -> Job:
    """`job_data`, parsed."""
    return parse_job(job_data(**arguments))


def in_version(job: Job, version: int) -> Job:
    """The job with another plan_version."""
    return identify(
        job.spec.model_copy(update={"execution": job.spec.execution.model_copy(update={"plan_version": version})})
    )
