"""A microbatch on the wire: its header, and its encoded tensors, which a transport takes to the consumer."""

from collections.abc import Callable, Sequence

import numpy as np
import zstandard
from crc32c import crc32c as crc32c_of
from disttrain.v1 import data_service_pb2, errors_pb2, microbatch_pb2

from dataserver.assembly import TensorSpec, total_bytes
from dataserver.fleet.schedule_message import schedule_messages
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.plan import Routing, StepPlan
from dataserver.planning.plan.views import ViewPlan, aligned
from dataserver.serving.errors import DataServiceError
from dataserver.serving.limits import MAX_MESSAGE_BYTES
from dataserver.serving.stream_memory import Buffer
from dataserver.serving.transport.interface import EncodedMicrobatch

_DTYPES = {
    np.dtype(np.uint8): microbatch_pb2.DATA_TYPE_UINT8,
    np.dtype(np.int32): microbatch_pb2.DATA_TYPE_INT32,
    np.dtype(np.int64): microbatch_pb2.DATA_TYPE_INT64,
    np.dtype(np.float32): microbatch_pb2.DATA_TYPE_FLOAT32,
}

Compressor = Callable[[memoryview], bytes]


def zstd_compressor(level: int) -> Compressor:
    """A function that makes one Zstandard frame with its content size."""
    context = zstandard.ZstdCompressor(level=level, write_content_size=True)
    return lambda data: context.compress(data)


def encode_microbatch(
    job: Job,
    plan: StepPlan,
    view: ViewPlan,
    tensors: Sequence[TensorSpec],
    raw: Buffer,
    validity: Buffer,
    compressor: Compressor | None,
    *,
    checksummed: bool = True,
    withheld: bool = False,
) -> EncodedMicrobatch:
    """Encode the tensors that lie in `raw` as `tensors` says, in place, and describe them.

    Args:
        job: the job.
        plan: the step's plan.
        view: what of the plan the tensors hold.
        tensors: name, dtype, shape and offset of each, in order of offset.
        raw: uint8 [total bytes]; holds the encoded bytes afterwards.
        validity: uint8 [items of the view], numbers of the proto.
        compressor: applied to each tensor that it makes smaller.
        checksummed: whether they are sent as bytes, which could change on the way.
        withheld: whether another rank gets them: they are only described, and `raw` is empty.

    Raises:
        DataServiceError: MICROBATCH_TOO_LARGE, the header alone exceeds what a message may hold.
    """
    table, total = _as_they_lie(tensors) if withheld else _encode_into(tensors, raw, compressor)
    payload = raw[:total]
    crc32c = crc32c_of(payload.data) if checksummed else 0
    header = microbatch_pb2.MicrobatchHeader(
        job_id=job.job_id,
        stream_id=job.stream_id,
        plan_hash=plan.hash,
        content_version=job.stream.content_version,
        step=plan.step,
        microbatch=view.microbatch,
        num_microbatches=plan.num_microbatches,
        denominators=denominators(plan),
        items=_items(plan, view, validity),
        sequence_valid=_sequence_valid(plan, view),
        routings=[_routing(r) for r in view.routings],
        sequence_parallel_groups=_groups(plan, view),
        schedules=schedule_messages(plan),
        images_on_some_ranks=view.images_on_some_ranks,
        tensors=table,
        total_bytes=total,
        crc32c=crc32c,
        withheld=withheld,
    )
    message = data_service_pb2.StreamMicrobatchesResponse(header=header).SerializeToString()
    if len(message) > MAX_MESSAGE_BYTES:
        raise DataServiceError(
            errors_pb2.ERROR_REASON_MICROBATCH_TOO_LARGE,
            f"the header of microbatch {view.microbatch} of step {plan.step} names {view.num_items} items in "
            f"{len(message)} bytes, more than the {MAX_MESSAGE_BYTES} of one message; lower execution.microbatch",
        )
    return EncodedMicrobatch(message, payload, crc32c)


def end_of_stream(reason: data_service_pb2.EndOfStream.Reason.ValueType, step: int, microbatch: int) -> bytes:
    """The last message of a stream that ends in order; (step, microbatch) is the first that was not sent."""
    end = data_service_pb2.EndOfStream(reason=reason, next_step=step, next_microbatch=microbatch)
    return data_service_pb2.StreamMicrobatchesResponse(end=end).SerializeToString()


def direct_offer(token: bytes, port: int, client_port: int) -> bytes:
    """The first message of a stream that offers a data connection."""
    offer = data_service_pb2.DirectOffer(port=port, token=token, client_port=client_port)
    return data_service_pb2.StreamMicrobatchesResponse(offer=offer).SerializeToString()


def restart(step: int, microbatch: int) -> bytes:
    """What comes before the header of the microbatch at which a stream begins again."""
    message = data_service_pb2.Restart(step=step, microbatch=microbatch)
    return data_service_pb2.StreamMicrobatchesResponse(restart=message).SerializeToString()


def denominators(plan: StepPlan) -> microbatch_pb2.Denominators:
    """What the step's losses are divided by."""
    return microbatch_pb2.Denominators(text_tokens=plan.text_tokens, target_patches=plan.target_patches)


def _groups(plan: StepPlan, view: ViewPlan) -> list[microbatch_pb2.SequenceParallelGroup]:
    groups, here = plan.groups, plan.groups.of(view.microbatch)
    found = (values[here].tolist() for values in (groups.first_rank, groups.degree, groups.readers(plan.step)))
    return [
        microbatch_pb2.SequenceParallelGroup(id=i, degree=degree, ranks=range(first, first + degree), reader=reader)
        for i, (first, degree, reader) in enumerate(zip(*found, strict=True))
    ]


def _as_they_lie(tensors: Sequence[TensorSpec]) -> tuple[list[microbatch_pb2.Tensor], int]:
    """The table of tensors that are not encoded, and their length."""
    return [_entry(spec, spec.offset, spec.num_bytes, compressed=False) for spec in tensors], total_bytes(tensors)


def _encode_into(
    tensors: Sequence[TensorSpec], raw: Buffer, compressor: Compressor | None
) -> tuple[list[microbatch_pb2.Tensor], int]:
    """The tensor table and the encoded length. No tensor grows, so that each moves towards the front or stays."""
    table: list[microbatch_pb2.Tensor] = []
    end = 0
    for spec in tensors:
        raw_bytes = spec.num_bytes
        source = raw[spec.offset : spec.offset + raw_bytes]
        encoded = None if compressor is None else compressor(source.data)
        start = aligned(end)
        raw[end:start] = 0
        smaller = encoded is not None and len(encoded) < raw_bytes
        size = len(encoded) if encoded is not None and smaller else raw_bytes
        if encoded is not None and smaller:
            raw[start : start + size] = np.frombuffer(encoded, np.uint8)
        elif start != spec.offset:
            raw[start : start + size] = source
        end = start + size
        table.append(_entry(spec, start, size, compressed=smaller))
    return table, end


def _entry(spec: TensorSpec, offset: int, encoded_bytes: int, *, compressed: bool) -> microbatch_pb2.Tensor:
    return microbatch_pb2.Tensor(
        name=spec.name,
        dtype=_DTYPES[spec.dtype],
        shape=spec.shape,
        offset=offset,
        encoded_bytes=encoded_bytes,
        raw_bytes=spec.num_bytes,
        codec=microbatch_pb2.CODEC_ZSTD if compressed else microbatch_pb2.CODEC_RAW,
    )


def _items(plan: StepPlan, view: ViewPlan, validity: Buffer) -> microbatch_pb2.Items:
    samples = plan.samples
    index, number = (view.items, None) if view.holds_samples else samples.locate(view.items)
    return microbatch_pb2.Items(
        dataset=samples.dataset[index].tolist(),
        epoch=samples.epoch[index].tolist(),
        sample=samples.sample[index].tolist(),
        image=[] if number is None else number.tolist(),
        validity=validity.tolist(),
        part=[] if samples.parts is None else samples.parts[index, 0].tolist(),
    )


def _sequence_valid(plan: StepPlan, view: ViewPlan) -> list[bool]:
    if view.kind is not ModuleKind.BACKBONE:
        return []
    filled: list[bool] = (np.bincount(view.slots, minlength=plan.sequences_per_microbatch) > 0).tolist()
    return filled


def _routing(routing: Routing) -> microbatch_pb2.Routing:
    return microbatch_pb2.Routing(
        source_module=routing.source_module,
        target_module=routing.target_module,
        source_rank=routing.source_rank.tolist(),
        source_start=routing.source_start.tolist(),
        target_rank=routing.target_rank.tolist(),
        target_start=routing.target_start.tolist(),
        rows=routing.rows.tolist(),
        source_microbatch=routing.source_microbatch.tolist(),
        target_microbatch=routing.target_microbatch.tolist(),
    )
