"""The measure of a run of shards as servers of one fleet send it to each other, and back; what comes in is checked."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np
from disttrain.v1 import peer_service_pb2 as pb

from dataserver.jobs import MeasuredRun, Rules
from dataserver.planning.measure import Lists, Measure, problem_of
from dataserver.planning.samples import I64
from dataserver.serving.peers.packed import packed, unpacked

IDENTITY_BYTES: Final = 32
MAX_SUM: Final = 1 << 53
"""Of the integers in one array: beyond, sums over all shards of a dataset could overflow."""


class UnfitMeasureError(ValueError):
    """An answer that is not the measure of the run that was asked for; the message says why."""


def measures_request(fingerprint: str, rules: Rules, run: int, build: str) -> pb.FetchMeasuresRequest:
    """The request of one run."""
    return pb.FetchMeasuresRequest(
        build=build,
        fingerprint=fingerprint,
        quarantine=rules.quarantine.digest if rules.quarantine else "",
        filter=rules.filter,
        tokenizer=rules.tokenizer_digest,
        patch=rules.sizing.patch,
        merge=rules.sizing.merge,
        max_patches=rules.sizing.max_patches,
        run=run,
    )


def measures_message(found: MeasuredRun, build: str) -> pb.FetchMeasuresResponse:
    """The message of one run."""
    message = pb.FetchMeasuresResponse(build=build, id=found.name, shards=b"".join(found.identities))
    for field in fields(Measure):
        value = getattr(found.measure, field.name)
        if isinstance(value, Lists):
            lists = getattr(message.measured, field.name)
            lists.counts, lists.values = packed(np.diff(value.at)), packed(value.values)
        else:
            setattr(message.measured, field.name, packed(value))
    return message


def measure_from_message(
    name: str, identities: Sequence[bytes], num_samples: I64, build: str, message: pb.FetchMeasuresResponse
) -> Measure:
    """The measure that a message stands for.

    Args:
        name: of the whole measure.
        identities: of the run's shards, as this server has them.
        num_samples: int64 [s], samples of each in its index.
        build: of this server.
        message: what a peer answered.

    Raises:
        UnfitMeasureError: it is not the measure that was asked for, or no measure at all.
    """
    if message.build != build:
        raise UnfitMeasureError(f"it was made by build {message.build[:64]!r}, and this server is {build}")
    if message.id != name:
        raise UnfitMeasureError(f"it is of measure {message.id[:64]!r}, not {name}")
    if message.shards != b"".join(identities):
        raise UnfitMeasureError(f"its {len(message.shards) // IDENTITY_BYTES} shards have other content than here")
    try:
        parts = {field.name: _part(message.measured, field.name, len(identities)) for field in fields(Measure)}
        problem = problem_of(found := Measure(**parts), num_samples)
    except ValueError as error:
        raise UnfitMeasureError(str(error)) from error
    if problem:
        raise UnfitMeasureError(problem)
    return found


def _part(message: pb.MeasuredShards, name: str, count: int) -> Any:
    value = getattr(message, name)
    if isinstance(value, bytes):
        return _bounded(name, value, count)
    lengths = _bounded(f"lengths of {name}", value.counts, count)
    at = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return Lists(at, _bounded(name, value.values, int(at[-1])))


def _bounded(name: str, data: bytes, count: int) -> I64:
    values = unpacked(name, data, count)
    if float(values.sum(dtype=np.float64)) > MAX_SUM:
        raise UnfitMeasureError(f"its {name} add up to more than {MAX_SUM}")
    return values
