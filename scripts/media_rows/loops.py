"""The loops that people write, on one thread: soundfile or PyAV, soxr and the same spectrogram; PyAV and Pillow."""

import io
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import soundfile
import soxr
from PIL import Image

from dataserver.audio.mel import log_mel
from dataserver.planning.job.fields import HOP, SAMPLE_RATE, Sizing
from dataserver.planning.stream.item_sizes import audio_sizing, video_sizing
from dataserver.planning.stream.video_frames import sampled_frames
from media_rows.files import Array, Stored


def loop_audio(one: Stored, sizing: Sizing) -> Array:
    """A clip by soundfile, soxr and the same spectrogram."""
    audio = audio_sizing(sizing)
    return log_mel(_mono(one, sizing), one.rows, audio.max_frames * HOP, audio.bins)


def _mono(one: Stored, sizing: Sizing) -> Array:
    """Samples of a clip, as many as are served: float32 [samples]."""
    with soundfile.SoundFile(io.BytesIO(one.data)) as file:
        sound = file.read(audio_sizing(sizing).max_seconds * file.samplerate, dtype="float32", always_2d=True)
        mono: Array = soxr.resample(sound.mean(axis=1), file.samplerate, SAMPLE_RATE, quality="VHQ")
    return mono


def loop_sound(one: Stored, sizing: Sizing) -> Array:
    """The sound of a video by PyAV, soxr and the same spectrogram; silence where containers round its end up."""
    audio = audio_sizing(sizing)
    with av.open(io.BytesIO(one.data), "r") as file:
        stream = file.streams.audio[0]
        stream.codec_context.thread_count = 1
        parts = [frame.to_ndarray().mean(axis=0) for frame in file.decode(stream)]
    rate = one.ref.height
    mono = np.zeros(min(one.ref.width, audio.max_seconds * rate), np.float32)
    joined = np.concatenate(parts)[: len(mono)]
    mono[: len(joined)] = joined
    return log_mel(soxr.resample(mono, rate, SAMPLE_RATE, quality="VHQ"), one.rows, audio.max_frames * HOP, audio.bins)


def loop_video(one: Stored, sizing: Sizing) -> Array:
    """A video by PyAV and Pillow, decoding on from frame to frame."""
    video, ref = video_sizing(sizing), one.ref
    count = sampled_frames(ref.frames, ref.microseconds, video)
    wanted = [n * ref.frames // count for n in range(count)]
    groups, rows, columns = one.item.depth, one.item.rows // one.item.depth, one.item.columns
    side, merge, span = sizing.patch, sizing.merge, video.temporal_patch
    taken, pixels = iter(wanted), list[Array]()
    following: int | None = next(taken)
    with av.open(io.BytesIO(one.data), "r") as file:
        stream = file.streams.video[0]
        stream.codec_context.thread_count = 1
        for number, frame in enumerate(file.decode(stream)):
            if number == following:
                size = (columns * side, rows * side)
                scaled = Image.fromarray(frame.to_ndarray(format="rgb24")).resize(size, Image.Resampling.BICUBIC)
                pixels.append(np.asarray(scaled))
                following = next(taken, None)
            if following is None:
                break
    pixels += [pixels[-1]] * (groups * span - len(pixels))
    cells = np.stack(pixels).reshape(groups, span, rows // merge, merge, side, columns // merge, merge, side, 3)
    return np.ascontiguousarray(cells.transpose(0, 2, 5, 3, 6, 1, 4, 7, 8)).reshape(one.rows, -1)


def whisper_extractor() -> Callable[[Stored, Sizing], object] | None:
    """What makes spectrograms as transformers does, behind the same decoding; None where it is not installed."""
    try:
        from transformers import WhisperFeatureExtractor
    except ImportError:
        return None
    make: Any = WhisperFeatureExtractor
    made: dict[int, Any] = {}

    def extract(one: Stored, sizing: Sizing) -> object:
        bins = audio_sizing(sizing).bins
        extractor = made.get(bins) or made.setdefault(bins, make(feature_size=bins))
        return extractor(_mono(one, sizing), sampling_rate=SAMPLE_RATE, return_tensors="np")

    return extract
