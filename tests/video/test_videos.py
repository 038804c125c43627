"""Headers and frames of videos: whole, odd and hostile files."""

import contextlib
import io

import numpy as np
import pytest
from numpy.typing import NDArray
from video.clips import FORMATS, all_frames, video

from dataserver.images import write_patches
from dataserver.planning.job.fields import FrameRule, Sizing, VideoSizing
from dataserver.planning.stream.grids import patch_grid
from dataserver.planning.stream.video_frames import frame_groups, sampled_frames
from dataserver.video import (
    FrameGrid,
    VideoHeader,
    VideoHeaderError,
    VideoShape,
    decode_frames,
    read_video_header,
    video_fault_of,
)
from dataserver.video.decoding import frames_at, is_even
from dataserver.video.header import Times, times_of

pytest.importorskip("av", reason="the extra video is not installed")
SIZING = Sizing(patch=8, merge=2)
WHOLE = VideoSizing(rule=FrameRule.UNIFORM, max_frames=4096, min_pixels=1, max_pixels=64 * 48)


def shape_of(header: VideoHeader) -> VideoShape:
    return VideoShape(header.frames, header.microseconds, header.width, header.height, header.orientation)


def decoded(data: bytes, rule: VideoSizing, sizing: Sizing = SIZING) -> tuple[bool, NDArray[np.uint8], FrameGrid]:
    """Whether a video is valid, and uint8 [groups, patches, span, bytes of a patch]."""
    shape = shape_of(read_video_header(data))
    sizing = sizing.model_copy(update={"video": rule})
    rows, columns = patch_grid(shape.width, shape.height, sizing.of_frames)
    grid = FrameGrid(frame_groups(shape.frames, shape.microseconds, rule), rows, columns)
    out = np.full((grid.groups * rows * columns, rule.temporal_patch * sizing.patch**2 * 3), 7, np.uint8)
    valid = decode_frames(data, shape, grid, sizing.of_frames, rule, out)
    return valid, out.reshape(grid.groups, rows * columns, rule.temporal_patch, -1), grid


def cut(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The patches of a frame that needs no scaling."""
    out = np.empty((pixels.shape[0] * pixels.shape[1] // 64, 192), np.uint8)
    write_patches(pixels, SIZING, out)
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_frames_are_those_of_a_plain_loop(name: str) -> None:
    data = video(name, 23, key_every=4)
    header = read_video_header(data)
    assert (header.frames, header.width, header.height, header.orientation) == (23, 64, 48, 1)
    assert header.microseconds == 2_300_000
    expected = np.stack([cut(pixels) for _, pixels in all_frames(data)])
    for wanted in (1, 4, 7, 23):
        valid, found, _ = decoded(data, WHOLE.model_copy(update={"max_frames": wanted, "temporal_patch": 1}))
        assert valid
        np.testing.assert_array_equal(found[:, :, 0], expected[np.arange(wanted) * 23 // wanted])
    pairs = decoded(data, WHOLE)[1]
    np.testing.assert_array_equal(pairs[:, :, 0], expected[::2])
    np.testing.assert_array_equal(pairs[:, :, 1], np.concatenate([expected[1::2], expected[-1:]]))
    assert video_fault_of(data, shape_of(header)) is None


def test_frames_between_keys_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the key frame before a sampled one, or on from the one before: not the whole video."""
    from dataserver.video import reading

    data, fed = video("h264", 60, key_every=10, between=0), list[object]()
    decode = reading.FrameDecoder.decode

    def counted(self: reading.FrameDecoder, packet: object) -> object:
        fed.append(packet)
        return decode(self, packet)  # type: ignore[arg-type]

    shape = shape_of(read_video_header(data))
    monkeypatch.setattr(reading.FrameDecoder, "decode", counted)
    grid = FrameGrid(2, 6, 8)
    rule = WHOLE.model_copy(update={"max_frames": 2, "temporal_patch": 1})
    out = np.empty((96, 192), np.uint8)
    assert decode_frames(data, shape, grid, SIZING, rule, out)
    assert len(fed) <= 6  # frames 0 and 30, with what the decoder holds back
    assert np.array_equal(out[48:], cut(all_frames(data)[30][1]))


def test_times_decide_where_rates_vary() -> None:
    """Half a second of ten frames, then one frame of five seconds and another of a tenth of a second."""
    times = [*range(0, 500, 50), 500, 5500]
    data = video("mkv", 12, times=times)
    header = read_video_header(data)
    assert (header.frames, header.microseconds) == (12, 5_600_000)
    valid, found, _ = decoded(data, WHOLE.model_copy(update={"max_frames": 4, "temporal_patch": 1}))
    frames = [cut(pixels) for _, pixels in all_frames(data)]
    assert valid
    assert np.array_equal(found[0, :, 0], frames[0])
    for n in (1, 2, 3):  # at 1.4, 2.8 and 4.2 s
        assert np.array_equal(found[n, :, 0], frames[10])


def test_rounded_times_of_an_even_rate_count_as_even() -> None:
    ticks = [round(n * 1000 * 1001 / 30_000) for n in range(300)]
    times = times_of([(tick, 33) for tick in reversed(ticks)])
    assert is_even(times)
    assert not is_even(times_of([(0, 1), (3, 1), (9, 1)]))
    assert frames_at(times, 7) == [i * 300 // 7 for i in range(7)]
    assert frames_at(Times([5], 1), 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("frames", "rate", "fields"),
    [(300, 30, {}), (7, 30, {}), (100_000, 25, {}), (50, 10, {"fps": "0.5"}), (90, 30, {"fps": "7.5"}), (2, 1, {})],
)
def test_frames_are_those_that_transformers_samples(frames: int, rate: int, fields: dict[str, str]) -> None:
    """By the arithmetic of `Qwen2VLVideoProcessor.sample_frames` (transformers 5.24), which needs torchvision."""
    rule = VideoSizing(**fields)  # type: ignore[arg-type]
    wanted = frames / rate * rule.milli_fps / 1000
    number = int(min(max(wanted, 4), min(768, frames) // 2 * 2, frames) // 2) * 2
    sampled = np.arange(0, frames, frames / number).astype(np.int64)
    assert sampled_frames(frames, round(frames / rate * 1e6), rule) == len(sampled) == number
    times = Times([n * 10 for n in range(frames)], frames * 10)
    assert frames_at(times, number) == sampled.tolist()


def test_frames_go_from_the_first_to_the_last_by_the_rule_of_qwen3() -> None:
    data = video("h264", 23, key_every=4)
    expected = np.stack([cut(pixels) for _, pixels in all_frames(data)])
    rule = VideoSizing(rule=FrameRule.QWEN3, fps="3", min_pixels=1, max_pixels=23 * 64 * 48)
    valid, found, grid = decoded(data, rule)
    assert valid
    numbers = np.linspace(0, 22, 6).round().astype(int)
    assert grid.groups == 3
    np.testing.assert_array_equal(found[:, :, 0], expected[numbers[::2]])
    np.testing.assert_array_equal(found[:, :, 1], expected[numbers[1::2]])
    uneven = Times([0, 10, 20, 500, 990], 1000)  # frames 0, 2 and 4 of an even rate would be shown at 0, 400 and 800
    assert frames_at(uneven, 3, FrameRule.QWEN3) == [0, 2, 3]
    assert frames_at(uneven, 3) == [0, 2, 3]
    assert frames_at(Times([0, 10, 20, 500, 990], 1000), 2, FrameRule.QWEN3) == [0, 3]
    assert frames_at(Times([*range(0, 50, 10)], 50), 2, FrameRule.QWEN3) == [0, 4]


def test_one_frame_is_repeated() -> None:
    valid, found, grid = decoded(video("h264", 1, between=0), VideoSizing(min_pixels=1, max_pixels=64 * 48))
    assert valid
    assert grid.groups == 1
    assert np.array_equal(found[0, :, 0], found[0, :, 1])
    assert found.any()


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_videos_are_turned_upright(degrees: int) -> None:
    import av

    plain, out = video("h264", 4, between=0), io.BytesIO()
    with av.open(io.BytesIO(plain)) as source, av.open(out, "w", format="mp4") as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                file.mux(packet)
    data = turned(out.getvalue(), degrees)
    header = read_video_header(data)
    assert (header.width, header.height) == ((48, 64) if degrees != 180 else (64, 48))
    _, found, _ = decoded(data, WHOLE)
    upright = np.rot90(all_frames(plain)[0][1], -degrees // 90)
    assert np.array_equal(found[0, :, 0], cut(np.ascontiguousarray(upright)))


def turned(data: bytes, degrees: int) -> bytes:
    """An MP4 whose frames are to be turned clockwise, by the matrix of its track."""
    one = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    a, b, c, d = ((value << 16) & 0xFFFFFFFF for value in one)
    matrix = b"".join(value.to_bytes(4, "big") for value in (a, b, 0, c, d, 0, 0, 0, 1 << 30))
    plain = b"".join(value.to_bytes(4, "big") for value in (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30))
    at = data.index(plain, data.index(b"tkhd"))
    return data[:at] + matrix + data[at + len(matrix) :]


def test_sound_beside_frames_is_passed_over() -> None:
    with_sound = video("h264", sound=True)
    assert read_video_header(with_sound) == read_video_header(video("h264"))
    assert decoded(with_sound, WHOLE)[0]


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"", "unreadable_header", "starts with"),
        (b"\0\0\0\x18ftypisom" + bytes(200), "unreadable_header", "MP4"),
        (b"\x1aE\xdf\xa3" + bytes(200), "unreadable_header", "Matroska"),
        (video("h264")[:600], "unreadable_header", "MP4"),
        (video("mkv", 3, between=0, times=[0, 1000, 3_700_000]), "video_too_large", "3700"),
    ],
)
def test_files_that_cannot_be_read_are_refused(data: bytes, kind: str, words: str) -> None:
    with pytest.raises(VideoHeaderError) as caught:
        read_video_header(data)
    assert caught.value.kind == kind
    assert words in caught.value.detail


def test_limits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataserver.video import header

    data = video("h264")
    for name, limit, words in (
        ("MAX_VIDEO_BYTES", 100, "bytes, limit 100"),
        ("MAX_VIDEO_FRAMES", 11, "more than 11 frames"),
        ("MAX_VIDEO_PIXELS", 12 * 64 * 48 - 1, "36864 pixels together"),
        ("MAX_FRAME_PIXELS", 64 * 48 - 1, "frames of 3072 pixels"),
        ("MAX_FRAME_SIDE", 63, "frames of 64 x 48"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(header, name, limit)
            with pytest.raises(VideoHeaderError, match=words) as caught:
                read_video_header(data)
            assert caught.value.kind == "video_too_large"
    assert read_video_header(data).frames == 12


def test_sound_alone_and_unknown_codecs_are_refused() -> None:
    import av

    for codec, kind, words in (("libopus", "audio", "no video"), ("ffv1", "video", "codec is ffv1")):
        out = io.BytesIO()
        with av.open(out, "w", format="matroska") as file:
            stream = file.add_stream(codec, rate=48_000 if kind == "audio" else 10)
            if kind == "video":
                stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
                frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
            else:
                frame = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), format="fltp", layout="mono")
                frame.sample_rate = 48_000
            file.mux([*stream.encode(frame), *stream.encode(None)])
        with pytest.raises(VideoHeaderError, match=words):
            read_video_header(out.getvalue())


@pytest.mark.parametrize("name", ["h264", "mkv", "vp9", "fragmented", "ts"])
def test_cut_files_are_refused_or_invalid_and_never_raise_otherwise(name: str) -> None:
    data = video(name, 20, key_every=20)
    shape = shape_of(read_video_header(data))
    out = np.empty((10 * 48, 2 * 192), np.uint8)
    for part in range(1, 10):
        cut_data = data[: len(data) * part // 10]
        try:
            header = read_video_header(cut_data)
        except VideoHeaderError:
            pass
        else:
            assert header.frames <= 20
        assert not decode_frames(cut_data, shape, FrameGrid(10, 6, 8), SIZING, WHOLE, out)
        assert not out.any()


def test_damaged_bytes_never_raise() -> None:
    rng = np.random.default_rng(0)
    for name in ("h264", "vp9", "ts"):
        whole = video(name, 8)
        shape = shape_of(read_video_header(whole))
        for _ in range(40):
            data = bytearray(whole)
            for at in rng.integers(0, len(data), 12):
                data[at] = int(rng.integers(0, 256))
            out = np.empty((4 * 48, 2 * 192), np.uint8)
            with contextlib.suppress(VideoHeaderError):
                read_video_header(bytes(data))
            if not decode_frames(bytes(data), shape, FrameGrid(4, 6, 8), SIZING, WHOLE, out):
                assert not out.any()
