"""The JSON schema of a job for other languages, made from the models."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

from dataserver.planning.job.fields import FILLED_IN, SpecModel
from dataserver.planning.job.spec import JobSpec

SCHEMA_ID: Final = "https://github.com/disttrain/disttrain/protos/disttrain/v1/job_spec.schema.json"
"""Names the schema; nothing needs to be found there."""

_ABOUT: Final = """A whole job, as GetOrCreateJob takes it.

Fields whose description says so may be left out: the server fills them in and answers with the complete job. Write
integers without a fraction or an exponent (4096, neither 4096.0 nor 4e3), and never as text. No key may come twice in
an object. A job that fits this schema may still be refused because its values do not fit together; the error then names
the field."""


def job_schema() -> dict[str, Any]:
    """The schema of a job, complete or as people write it (JSON Schema, draft 2020-12)."""
    schema = JobSpec.model_json_schema()
    definitions = schema["$defs"]
    for model in _models(SpecModel):
        part = schema if model is JobSpec else definitions.get(model.__name__, {"properties": {}})
        for field, text in _described(model).items():
            if field in part["properties"]:
                part["properties"][field] = dict(sorted({**part["properties"][field], "description": text}.items()))
    for model, fields in FILLED_IN.items():
        part = definitions[model.__name__]
        part["required"] = [name for name in part.get("required", ()) if name not in fields]
        for field in fields:
            described = part["properties"][field]
            described["description"] += " Left out, it is filled in by the server."
            described.pop("default", None)
    layouts = definitions["Execution"]["properties"]["layout"]["discriminator"]["mapping"].values()
    for layout in (definitions[reference.rpartition("/")[2]] for reference in layouts):
        layout["required"] = sorted({"kind", *layout.get("required", ())})
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID}
    return {**about, **schema, "description": _ABOUT}


def _models(base: type[SpecModel]) -> Iterator[type[SpecModel]]:
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


def _described(model: type[SpecModel]) -> dict[str, str]:
    """What is written below each field of a model, or of those that it derives from."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, SpecModel):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            if isinstance(definition, ast.ClassDef):
                found |= dict(_documented(definition))
    return found


def _documented(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(definition.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
