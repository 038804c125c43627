"""The JSON schema of a job for other languages, made from the models."""

from typing import Any, Final

from dataserver.planning.job import JobSpec
from dataserver.planning.jobspec import FILLED_IN

SCHEMA_ID: Final = "https://github.com/disttrain/disttrain/protos/disttrain/v1/job_spec.schema.json"
"""Names the schema; nothing needs to be found there."""

_ABOUT: Final = """A whole job, as GetOrCreateJob takes it.

Fields whose description says so may be left out: the server fills them in and answers with the complete job. Integers
are written without a fraction and without an exponent (4096, neither 4096.0 nor 4e3), every key stands once in an
object, and numbers are never written as text. A job that fits this schema may still be refused for what the values
mean together; the error then names the field."""


def job_schema() -> dict[str, Any]:
    """The schema of a job, complete or as people write it (JSON Schema, draft 2020-12)."""
    schema = JobSpec.model_json_schema()
    definitions = schema["$defs"]
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
