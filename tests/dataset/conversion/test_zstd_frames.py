"""Whole streams of Zstandard are told from cut ones, however they are cut into pieces."""

import random

import pytest
import zstandard

from dataserver.dataset.conversion.zstd_frames import ZstdFrames

DRAW = random.Random(3)
NOISE = DRAW.randbytes(300_000)
SKIPPED = b"\x5a\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"magic"


def frame(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def streamed(data: bytes) -> bytes:
    """A frame that does not say its size."""
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return compressor.compress(data) + compressor.flush()


STREAMS = {
    "noise": frame(NOISE),
    "text": frame(b"some words and more " * 40_000),
    "runs": frame(bytes(1 << 20)),
    "nothing": frame(b""),
    "checksum": frame(NOISE[:999], write_checksum=True),
    "streamed": streamed(NOISE),
    "small": frame(b"x" * 20, write_content_size=False),
    "several": frame(NOISE[:5000]) + SKIPPED + frame(b"") + streamed(b"abc" * 999),
}


def follow(pieces: list[bytes]) -> tuple[bool, int]:
    frames = ZstdFrames()
    num_bytes = sum(frames.feed(piece) for piece in pieces)
    return frames.is_whole, num_bytes


def cut(data: bytes, most: int) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        size = DRAW.randint(1, most)
        found.append(data[at : at + size])
        at += size
    return found


@pytest.mark.parametrize("name", STREAMS)
def test_whole_streams_are_whole_and_cut_ones_are_not(name: str) -> None:
    data = STREAMS[name]
    for most in (1, 7, 1000, 1 << 20):
        if len(data) // most < 50_000:
            assert follow(cut(data, most)) == (True, len(data)), most
    cuts = {0, 1, 3, 7, 8, len(data) // 2, *range(max(len(data) - 12, 0), len(data)), DRAW.randrange(len(data))}
    ends = {len(STREAMS["several"]) - len(streamed(b"abc" * 999)) - n for n in (0, len(frame(b"")))}
    for length in cuts - (ends if name == "several" else set()):
        assert not follow(cut(data[:length], 1 << 20))[0], length


@pytest.mark.parametrize("name", STREAMS)
def test_zeros_behind_the_end_do_not_belong_to_the_stream(name: str) -> None:
    data = STREAMS[name]
    for pieces in ([data + bytes(600)], [data, bytes(600), bytes(5)], [data + bytes(1), bytes(3) + b"x"]):
        assert follow(pieces) == (True, len(data))


def test_what_is_no_frame_is_left_to_the_library() -> None:
    for data in (b"no frame at all", STREAMS["noise"] + b"more that is none", bytes(99)):
        assert follow([data]) == (False, len(data))
