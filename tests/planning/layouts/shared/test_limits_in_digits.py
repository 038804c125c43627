"""What is refused before a job begins: whole texts, on both sides of every limit, in one test."""

from typing import Any

import numpy as np
import pytest
from builders.jobs import job_data
from builders.transfers import INTO, transfer, with_transfers

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.job.limits import _extremes
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.stream.samples import ShardTable
from dataserver.planning.stream.sizing import shard_table

Samples = list[tuple[int, list[int]]]


def job(memory: dict[str, int], ratio: str = "0", kind: str = "pipelined", **fields: Any) -> Job:
    """Modules of two ranks, some with memory for so many patches or tokens; fields of the encoder."""
    data = job_data(encoder=2, backbone=(2, 1), generator=2, stream={"generation": {"ratio": ratio, "query_tokens": 8}})
    for module in data["execution"]["modules"]:
        if module["name"] in memory:
            module["memory"] = {"budget_bytes": memory[module["name"]], "unit_bytes": 1}
    data["execution"]["modules"][0] |= fields
    data["execution"]["layout"] = {"kind": kind}
    return parse_job(data)


def table(made: Job, samples: Samples) -> ShardTable:
    """Samples of so many text tokens and images of so many patches, multiples of 4, in rows 7, 17, ..."""
    widths = [7 * patches for _, images in samples for patches in images]
    offsets = np.cumsum([0, *(len(images) for _, images in samples)])
    texts, rows = np.array([text for text, _ in samples], np.int64), 7 + 10 * np.arange(len(samples))
    sides = np.array(widths, np.int32), np.full(len(widths), 28, np.int32)
    return shard_table(made.stream, rows, texts, offsets, *sides)


def text_of(made: Job, samples: Samples) -> str | None:
    try:
        layout_of(made.spec.execution).limits(made.spec).add(0, table(made, samples), "shard s")
    except ValueError as error:
        return str(error)
    return None


END = "or leave such samples out with a filter or a quarantine list"


def test_limits_of_samples_in_digits() -> None:
    # An image: 16 patches fit 16; of several too large ones the largest is named, of equals the first.
    samples: Samples = [(5, [16]), (5, [12]), (5, [20]), (5, [24, 8]), (5, [24])]
    assert text_of(job({"vit": 24}, balance="lpt"), samples) is None
    assert text_of(job({"vit": 23}), samples) == (
        "shard s, row 37: it has 24 patches of an image, but the memory of a rank of module vit holds 23 (2 too large "
        f"in this shard); raise memory.budget_bytes of the module, lower stream.sizing.max_patches, {END}"
    )
    # All images of a sample on the two ranks of the encoder: 3 x 16 patches need 32 on one of them.
    samples = [(5, [16, 16]), (5, [16, 16, 16]), (5, [16])]
    assert text_of(job({"vit": 32}), samples) is None
    together = (
        "shard s, row 17: its 3 images, which belong to one wave, have {} patches{}, but {} of module vit with memory "
        "for {} each cannot hold them; raise memory.budget_bytes or dp of the module, lower stream.sizing.max_patches, "
        + END
    )
    assert text_of(job({"vit": 31}), samples) == together.format(48, "", "2 ranks", 31)
    assert text_of(job({"vit": 47}, balance="none"), samples) == together.format(48, "", "1 rank", 47)
    assert text_of(job({"vit": 48}, balance="none"), samples) is None
    padded: Samples = [(5, [8, 8]), (5, [8, 8, 8])]
    assert text_of(job({"vit": 16}, padded=True), padded) is None
    assert text_of(job({"vit": 15}, padded=True), padded) == together.format(24, " before padding", "2 ranks", 15)
    assert text_of(job({"vit": 31}, kind="colocated"), samples) is None, "microbatches are of each rank's own"
    # A sample in the backbone: 4 tokens of an image, two around it, BOS and EOS, text.
    samples = [(5, [16]), (8, [16]), (20, [])]
    assert text_of(job({"llm": 22}), samples) is None
    assert text_of(job({"llm": 15}), samples) == (
        "shard s, row 27: it has 22 tokens, but the memory of a rank of module llm holds 15 (2 too large in this shard)"
        f"; raise memory.budget_bytes of the module, lower stream.seq_len, {END}"
    )
    # A target is never cut: 16 patches in the generator, though no encoder sees it.
    assert text_of(job({"dit": 15}), [(5, [16])]) is None
    assert text_of(job({"dit": 16, "vit": 1}, "1"), [(5, [16]), (0, [])]) is None
    assert text_of(job({"dit": 15}, "0.5"), [(5, [16])]) == (
        "shard s, row 7: it has 16 patches of an image, but the memory of a rank of module dit holds 15 (1 too large "
        f"in this shard); raise memory.budget_bytes of the module, lower stream.sizing.max_patches, {END}"
    )


def test_images_that_no_module_handles() -> None:
    def without(kind: str, ratio: str, samples: Samples) -> str | None:
        generator = 0 if kind == "generator" else 1
        encoder = 0 if kind == "encoder" else 1
        return text_of(
            parse_job(job_data(encoder=encoder, generator=generator, stream={"generation": {"ratio": ratio}})), samples
        )

    both: Samples = [(5, []), (5, [16]), (0, [16, 16])]
    assert without("encoder", "0", both) == (
        "shard s, row 17: the sample has images to understand (2 such samples in this shard) but no module of kind "
        f"encoder handles dataset laion; add one, name the dataset in the datasets of one, {END}"
    )
    assert without("encoder", "1", both[:2]) is None
    assert without("encoder", "1", both) is not None
    assert without("encoder", "0", both[:1]) is None
    assert without("generator", "0", both) is None


@pytest.mark.parametrize("tokens", [10, 512])
def test_a_backbone_without_memory_takes_all(tokens: int) -> None:
    assert text_of(job({}), [(tokens, [])]) is None


def extremes(seq_len: int, packing: bool = True, **layout: Any) -> list[int]:
    """The largest numbers of 8 sequences on two ranks of an encoder and four of a backbone, in any layout."""
    stream = {"global_batch": 8, "seq_len": seq_len, "packing": {"enabled": packing}}
    data = job_data(stream=stream, execution={"layout": {"kind": "pipelined", **layout}}, encoder=2, backbone=(4, 2))
    vit, llm = data["execution"]["modules"]
    vit["cost"] = {"microbatch_ns": 7, "linear_ps": 3000, "quadratic_fs": 0, "backward_percent": 100}
    llm["cost"] = {"microbatch_ns": 5, "linear_ps": 2000, "quadratic_fs": 0, "backward_percent": 150}
    vit["memory"] = {"budget_bytes": 10**6, "unit_bytes": 3}
    return [extreme.value for extreme in _extremes(with_transfers(data, transfer(INTO, 11, "2", 6)).spec)]


def test_extremes_in_digits() -> None:
    # Twice as many sequences as planned, of 1,000 tokens or 4,000 patches each; at most 333 images in one.
    vit_ns, llm_ns, items = 16 * 4_000 * 3, 16 * 1_000 * 2, 16 * 333
    transfers = 2**21 * (11 + 4_000 * 6 * 1_000 // 2_000)
    assert extremes(1_000) == [
        (vit_ns + 7) * 200,
        (4_000 * 3 + 7) * 200 * 4,
        2 * 4_000 * 3 * items,
        10**6 // 3 * 2 * 3,
        (llm_ns + 5) * 250,
        (1_000 * 2 + 5) * 250 * 4,
        2 * 1_000 * 2 * items,
        16 * 1_000 * 1_000 * (6 + 2_000),
        (vit_ns + 16_384 * 2 * 7) * 2 + (llm_ns + 16_384 * 4 * 5) * 5 // 2 + transfers,
    ]
    # Without packing a sequence is a sample; memory of chunks; as many images as a step may have.
    unpacked = extremes(1_000, packing=False)
    assert (unpacked[2], unpacked[6]) == (2 * 4_000 * 3 * items, 2 * 1_000 * 2 * 16)
    assert extremes(1_000, schedule="interleaved", chunks=3)[3] == 10**6 // 3 * 2 * 3 * 3
    assert extremes(2**18)[2] == 2 * 2**18 * 4 * 3 * 4 * 2**18
