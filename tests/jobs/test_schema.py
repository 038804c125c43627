"""The published schema accepts what servers accept: complete jobs, and jobs as people write them."""

import itertools
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from builders.jobs import changed, leaves
from jobs.written import catalog, readme_job
from planning.job.test_identity import SCHEMA, base_jobs
from pydantic import ValidationError

from dataserver.jobs import DatasetUnknownError, FillingError, TokenizerUnknownError, fill_job
from dataserver.planning.job.identity import JobSpecError, UnsupportedVersionError, parse_job
from dataserver.planning.job.spec import JobSpec

# JSON Schema takes 4096.0 for an integer; the schema's description says that jobs do not.
_Draft = jsonschema.Draft202012Validator
_Validator = jsonschema.validators.extend(
    _Draft, type_checker=_Draft.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
)
PUBLISHED = _Validator(json.loads(SCHEMA.read_text()))
CATALOG = catalog("llama")

WRONG = [True, 0, -1, 3, 1.5, 4096.0, 10**20, "4096", " 0.5 ", "0.5", "1e3", ".5", "-0.5", "x", "", None, [], {}, [1]]
"""Some of them fit where they are put."""
EVERY = 3 if os.environ.get("DISTTRAIN_TEST_EXAMPLES") == "100" else 6
"""One mutant in so many is tried; each job begins with another."""


def refusals(data: Any) -> list[str]:
    """Kinds of what the server finds wrong; `value_error` is ours, about what values mean, the rest is about types."""
    try:
        filled = fill_job(data, CATALOG)
        parse_job(filled)
    except (FillingError, DatasetUnknownError, TokenizerUnknownError, UnsupportedVersionError):
        return ["value_error"]
    except JobSpecError:
        return kinds(filled)
    return []


def kinds(filled: Any) -> list[str]:
    """Pydantic's names of what is wrong."""
    try:
        JobSpec.model_validate_json(json.dumps(filled), strict=True)
    except ValidationError as error:
        places = [e["loc"] for e in error.errors()]  # members that are wrong are not counted as members
        return [e["type"] for e in error.errors() if e["type"] != "too_short" or not any(e["loc"] < p for p in places)]
    return []


def jobs() -> list[dict[str, Any]]:
    """Complete and incomplete jobs of every layout."""
    written = readme_job()
    filled = fill_job(written, CATALOG)
    dumped = json.loads(JobSpec.model_validate_json(json.dumps(filled)).model_dump_json())
    named = changed(
        written,
        ("execution", "modules", 0, "cost"),
        {"model": "vit-h", "device": "h100", "efficiency": "1", "attention_efficiency": "0.5", "frozen": False},
    )
    return [written, filled, dumped, named, *base_jobs()]


def mutants(data: dict[str, Any]) -> Iterator[Any]:
    """Every value replaced by others and taken away, and a key more in every object."""
    paths = sorted({path[:n] for path, _ in leaves(data) for n in range(1, len(path) + 1)}, key=str)
    for path in paths:
        for value in WRONG:
            yield changed(data, path, value)
        *parents, last = path
        copied = json.loads(json.dumps(data))
        inner = copied
        for parent in parents:
            inner = inner[parent]
        if isinstance(inner, dict):
            del inner[last]
            yield copied
            yield changed(data, (*parents, "bogus"), 1)


def test_it_is_a_schema_with_a_name() -> None:
    _Draft.check_schema(PUBLISHED.schema)
    assert PUBLISHED.schema["$id"].endswith("/protos/disttrain/v1/job_spec.schema.json")
    assert PUBLISHED.schema["$schema"] == _Draft.META_SCHEMA["$id"]
    for name, part in PUBLISHED.schema["$defs"].items():
        assert part["description"], name
        assert part["type"] != "object" or part["additionalProperties"] is False, name
        for field, described in part.get("properties", {}).items():
            assert described["description"], f"{name}.{field}"


def test_fields_that_a_server_fills_in_say_so() -> None:
    said = re.findall(r'"description": "[^"]*Left out, it is filled in by the server\."', SCHEMA.read_text())
    assert len(said) == 1 + 2 + 1 + 10


@pytest.mark.parametrize("number", range(12))
def test_schema_and_server_agree(number: int) -> None:
    data = jobs()[number]
    assert len(jobs()) == 12
    assert (refusals(data), list(PUBLISHED.iter_errors(data))) == ([], [])
    agreed = {True: 0, False: 0}
    for mutant in itertools.islice(mutants(data), number % EVERY, None, EVERY):
        fits, found = PUBLISHED.is_valid(mutant), refusals(mutant)
        assert set(found) <= {"value_error"} if fits else found, (mutant, found)
        agreed[fits] += 1
    assert min(agreed.values()) > 5, "mutants of both kinds were tried"
