"""Headers of microbatches: each field where it belongs, each limit on both sides, and the words of every refusal."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from disttrain.v1 import microbatch_pb2 as mb

from trainclient.stream.errors import ProtocolError
from trainclient.stream.microbatch import (
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_TENSORS,
    NUMPY_TYPES,
    Cursor,
    TensorEntry,
    TensorTable,
    read_header,
    read_table,
)

UINT8, INT32 = np.dtype("<u1"), np.dtype("<i4")
SMALLER = "make microbatches smaller (execution.microbatch, seq_len, stream.sizing) or raise max_microbatch_bytes"


def tensor(name: str, offset: int, shape: list[int], size: int, **fields: Any) -> mb.Tensor:
    given = {"dtype": mb.DATA_TYPE_UINT8, "encoded_bytes": size, "raw_bytes": size, "codec": mb.CODEC_RAW, **fields}
    return mb.Tensor(name=name, offset=offset, shape=shape, **given)


def two() -> mb.MicrobatchHeader:
    """A compressed tensor of 100 bytes in 10, and 3 integers behind it."""
    packed = tensor("a", 0, [10, 10], 10, raw_bytes=100, codec=mb.CODEC_ZSTD)
    header = mb.MicrobatchHeader(total_bytes=76, crc32c=9, plan_hash=b"h" * 32, num_microbatches=1)
    header.tensors.extend([packed, tensor("b", 64, [3], 12, dtype=mb.DATA_TYPE_INT32)])
    return header


def refused(change: Callable[[mb.MicrobatchHeader], object], max_bytes: int = 140) -> str:
    header = two()
    change(header)
    with pytest.raises(ProtocolError) as caught:
        read_header(header, read_table(header, max_bytes))
    return str(caught.value)


def setting(**fields: Any) -> Callable[[mb.MicrobatchHeader], object]:
    """Sets fields of the second tensor."""

    def change(header: mb.MicrobatchHeader) -> None:
        for name, value in fields.items():
            if name == "shape":
                del header.tensors[1].shape[:]
                header.tensors[1].shape.extend(value)
            else:
                setattr(header.tensors[1], name, value)

    return change


def test_a_table_is_read_as_it_is() -> None:
    entries = (TensorEntry("a", UINT8, (10, 10), 0, 10, 100, True), TensorEntry("b", INT32, (3,), 64, 12, 12, False))
    table = read_table(two(), 140)
    assert table == TensorTable(entries, 76, 140, 9)
    assert table.compressed
    plain = mb.MicrobatchHeader(total_bytes=12, tensors=[tensor("b", 0, [3], 12, dtype=mb.DATA_TYPE_INT32)])
    assert read_table(plain, 12) == TensorTable((TensorEntry("b", INT32, (3,), 0, 12, 12, False),), 12, 12, 0)
    assert not read_table(plain, 12).compressed
    assert refused(lambda _: None, 139) == f"it announces tensors of 140 bytes, at most 139 are taken: {SMALLER}"
    assert refused(lambda _: None, 75) == f"it announces a microbatch of 76 bytes, at most 75 are taken: {SMALLER}"
    for shape in ([1] * 8, [0] * 8, [], [0, (1 << 48) - 1], [1 << 24, 0, (1 << 24) - 1]):
        size = int(np.prod(shape, dtype=np.int64))
        entry = read_table(mb.MicrobatchHeader(tensors=[tensor("x", 0, shape, size)], total_bytes=size), 9).entries[0]
        assert (entry.shape, entry.raw_bytes) == (tuple(shape), size)
    many = [tensor(str(i), 0, [0], 0) for i in range(65)]
    assert len(read_table(mb.MicrobatchHeader(tensors=many[:64]), 0).entries) == 64
    with pytest.raises(ProtocolError, match="it sent 65 tensors, at most 64 are allowed"):
        read_table(mb.MicrobatchHeader(tensors=many), 0)
    types = {mb.DATA_TYPE_UINT8: "u1", mb.DATA_TYPE_INT32: "i4", mb.DATA_TYPE_INT64: "i8", mb.DATA_TYPE_FLOAT16: "f2"}
    types |= {mb.DATA_TYPE_BFLOAT16: "u2", mb.DATA_TYPE_FLOAT32: "f4"}
    assert dict(NUMPY_TYPES) == {key: np.dtype("<" + name) for key, name in types.items()}
    assert (MAX_TENSORS, MAX_DIMENSIONS, MAX_ELEMENTS) == (64, 8, 1 << 48)


def test_the_words_of_each_contradiction() -> None:
    overlap = "which overlaps the one before or the end at"
    cases = {
        "tensor b lies at 0 + 12 bytes, " + overlap + " 76": setting(offset=0),
        "tensor b lies at 128 + 12 bytes, " + overlap + " 76": setting(offset=128),
        "tensor b lies at 64 + 12 bytes, " + overlap + " 75": lambda h: setattr(h, "total_bytes", 75),
        "tensor 'b' lies at 65, no multiple of 64": setting(offset=65),
        "tensor names ['a', 'a'] are not unique": setting(name="a"),
        "tensor 'b' of shape (2,) has 12 bytes, 8 are required": setting(shape=[2]),
        "tensor 'b' of shape (3, 2) has 12 bytes, 24 are required": setting(shape=[3, 2]),
        "tensor 'b' has the unknown codec 7": setting(codec=7),
        "tensor 'b' is not compressed, but has 11 bytes instead of 12": setting(encoded_bytes=11),
        f"tensor 'b' has the impossible shape {(1,) * 8}": setting(shape=[1] * 9),
        "tensor 'b' has the impossible shape (-1,)": setting(shape=[-1]),
        f"tensor 'b' has the impossible shape {(0, 1 << 48)}": setting(shape=[0, 1 << 48]),
        f"tensor 'b' has the impossible shape {(1 << 24, 0, 1 << 24)}": setting(shape=[1 << 24, 0, 1 << 24]),
        "a plan hash of 31 bytes, 32 are required": lambda h: setattr(h, "plan_hash", b"h" * 31),
        "microbatch 1 of a step that has 1": lambda h: setattr(h, "microbatch", 1),
        "item arrays of lengths [1, 0, 0, 0] differ": lambda h: h.items.dataset.append(1),
        "items of the unknown validities [0, 9]": lambda h: h.items.CopyFrom(
            mb.Items(dataset=[0] * 3, epoch=[0] * 3, sample=[0] * 3, validity=[9, mb.VALIDITY_VALID, 0])
        ),
        "1 numbers of parts of 0 items": lambda h: h.items.part.append(1),
        "routing arrays of lengths [0, 0, 1, 0, 0, 0, 0] differ": lambda h: h.routings.add(source_start=[1]),
    }
    for words, change in cases.items():
        assert refused(change).startswith(f"it sent {words}"), words
    assert refused(setting(dtype=99)) == "tensor 'b' has the unknown type 99"
    for schedules in ([("m", [1], 1), ("m", [1], 1)], [("m", [], 1)], [("m", [1, 0], 1)], [("m", [1], 0)]):
        added = [mb.ModuleSchedule(module=m, in_flight=held, chunks=c) for m, held, c in schedules]
        text = refused(lambda h, added=added: h.schedules.extend(added))  # type: ignore[misc]
        assert text.startswith(f"it sent schedules {schedules}; each module needs one, with 1 or more in flight on")


def test_every_field_of_a_header_arrives() -> None:
    header = two()
    validity = [mb.VALIDITY_UNKNOWN, mb.VALIDITY_VALID, mb.VALIDITY_INVALID]
    columns = {"dataset": [1, 2, 3], "epoch": [4, 5, 6], "image": [9, 10, 11], "part": [0, 3, 1]}
    items = mb.Items(sample=[7, 8, 2**64 - 1], validity=validity, **columns)
    ends = ("source_microbatch", "source_rank", "source_start", "target_microbatch", "target_rank", "target_start")
    routing = {name: [10 * i, 10 * i + 1] for i, name in enumerate((*ends, "rows"))}
    header.MergeFrom(
        mb.MicrobatchHeader(
            job_id="j",
            stream_id="s",
            content_version=3,
            step=5,
            microbatch=1,
            num_microbatches=3,
            denominators=mb.Denominators(text_tokens=11, target_patches=12),
            items=items,
            sequence_valid=[True, False],
            routings=[mb.Routing(source_module="vit", target_module="llm", **routing)],
            sequence_parallel_groups=[mb.SequenceParallelGroup(id=4, degree=2, ranks=[6, 7])],
            schedules=[mb.ModuleSchedule(module="llm", in_flight=[3, 1], drain_every=2, chunks=1)],
            tensors=[tensor("half", 128, [1], 2, dtype=mb.DATA_TYPE_BFLOAT16)],
            total_bytes=130,
        )
    )
    found = read_header(header, read_table(header, 1000))
    assert (found.job_id, found.stream_id, found.plan_hash, found.content_version) == ("j", "s", b"h" * 32, 3)
    assert (found.step, found.microbatch, found.num_microbatches, found.cursor) == (5, 1, 3, Cursor(5, 1))
    assert (found.text_tokens, found.target_patches, found.nbytes, found.wait_s) == (11, 12, 194, 0.0)
    header.total_bytes = 900  # whatever of it is no tensor's is received as well
    assert read_header(header, read_table(header, 1000)).nbytes == 900
    kept = found.items
    assert {name: getattr(kept, name).tolist() for name in columns} == columns
    assert (kept.sample.tolist(), kept.sample.dtype, len(kept)) == ([7, 8, 2**64 - 1], np.uint64, 3)
    assert (kept.valid.tolist(), kept.invalid.tolist()) == ([False, True, False], [False, False, True])
    assert found.sequence_valid.tolist() == [True, False]
    (entries,) = found.routings
    assert (entries.source_module, entries.target_module) == ("vit", "llm")
    assert {name: getattr(entries, name).tolist() for name in routing} == routing
    (group,) = found.sequence_parallel_groups
    assert (group.id, group.degree, group.ranks) == (4, 2, (6, 7))
    (schedule,) = found.schedules
    assert (schedule.module, schedule.in_flight.tolist(), schedule.drain_every, schedule.chunks) == (
        "llm",
        [3, 1],
        2,
        1,
    )
    assert (found.bfloat16, dict(found.tensors)) == (frozenset({"half"}), {})
    other = found.with_tensors({"x": 1})
    assert (dict(other.tensors), other.items, other.step) == ({"x": 1}, found.items, 5)
    header.microbatch = 2
    assert [found.last_of_step, read_header(header, read_table(header, 1000)).last_of_step] == [False, True]
    assert [Cursor(3).after(1), Cursor(3).after(2), Cursor(3, 1).after(3)] == [Cursor(4, 0), Cursor(3, 1), Cursor(3, 2)]
    assert Cursor(3) == Cursor(3, 0)
