"""The answer of DescribeSamples: texts, columns and images of a few samples."""

from collections.abc import Sequence
from typing import Final

from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import errors_pb2

from dataserver.dataset import Dataset, SampleDescription, Scalar, describe
from dataserver.planning.stream.samples import ROW_BITS
from dataserver.serving.errors import DataServiceError, invalid_request
from dataserver.serving.limits import MAX_MESSAGE_BYTES

MAX_SAMPLES: Final = 1024
FRAME_BYTES: Final = 5
"""Most bytes that the response adds around a description: a tag and its length."""


def describe_samples(dataset: Dataset, samples: Sequence[int]) -> pb.DescribeSamplesResponse:
    """Say which samples the numbers stand for, in their order.

    Raises:
        DataServiceError: SAMPLE_UNKNOWN; or REQUEST_INVALID, too many for one call or for one message.
    """
    if len(samples) > MAX_SAMPLES:
        raise invalid_request(f"{len(samples)} samples are asked for; at most {MAX_SAMPLES} are allowed")
    messages: dict[int, pb.SampleDescription] = {}
    size = 0
    try:
        for n, found in describe(dataset, [divmod(sample, 1 << ROW_BITS) for sample in samples]):
            messages[n] = _message(samples[n], found)
            size += messages[n].ByteSize() + FRAME_BYTES
            if size > MAX_MESSAGE_BYTES:
                raise invalid_request(
                    f"the descriptions of {len(samples)} samples have more than the {MAX_MESSAGE_BYTES} bytes of one "
                    "message; ask for fewer"
                )
    except IndexError as error:
        raise DataServiceError(errors_pb2.ERROR_REASON_SAMPLE_UNKNOWN, str(error)) from None
    return pb.DescribeSamplesResponse(samples=(messages[n] for n in range(len(samples))))


def _message(sample: int, found: SampleDescription) -> pb.SampleDescription:
    columns = [_column(name, value) for name, value in found.columns.items()]
    return pb.SampleDescription(sample=sample, shard=found.shard, key=found.key, columns=columns)


def _column(name: str, value: Scalar) -> pb.SidecarColumn:
    match value:
        case bool():  # before int, which it also is
            return pb.SidecarColumn(name=name, boolean=value)
        case int():
            return pb.SidecarColumn(name=name, integer=value)
        case float():
            return pb.SidecarColumn(name=name, number=value)
        case str():
            return pb.SidecarColumn(name=name, text=value)
