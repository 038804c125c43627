"""The sound of a video as a clip: what its packets say of it, and its samples.

The rules of sound version 1. They stand for steps 1 to 3 of `dataserver.audio.decoding`, whose others hold here, too:

1. The first stream of sound in a video of `formats.py`, of a codec of `SOUND_CODECS`, decoded by FFmpeg to float32.
2. Its length is that of its packets: from the first one that is played, but not from before time 0, to the end of the
   last. Its rate and channels are those of its first decoded frame.
3. Frames follow each other. Where one begins more than a tenth of a second behind the end of the one before, there is
   silence between them: encoders leave pauses out. Up to a quarter of a second that the end lacks is silence as well:
   containers round times, and do not tell what a decoder drops. The mean of all channels.

A clip is invalid where a packet cannot be decoded, more is missing at its end, or its rate or channels change. FFmpeg
computes in float32, in another order where a processor has other vector instructions: `sound_digest` tells servers
apart whose spectrograms differ.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.audio import (
    MAX_CHANNELS,
    AudioHeader,
    AudioHeaderError,
    AudioShape,
    InvalidAudioError,
    check_header,
    require_audio,
)
from dataserver.video.header import opened, require_video
from dataserver.video.limits import FIRST_PACKETS

if TYPE_CHECKING:
    import av
    from av.container import InputContainer

SOUND_VERSION: Final = 1
"""Version of the rules above."""
SOUND_CODECS: Final = ("AAC", "MP3", "Opus", "Vorbis")
_DECODERS: Final = ("aac", "mp3float", "opus", "vorbis")
"""FFmpeg's decoders of these. Those of others are never opened."""
_NO_VIDEO: Final = "it is no video"
MAX_SOUND_PACKETS: Final = 1 << 20
"""Most packets, of an hour 290 a second: packets of a few bytes can be many."""
_PAUSES: Final = 10
"""Part of a second from which on a pause between frames is one."""
_UNTOLD: Final = 4
"""Part of a second that the end may lack."""


def require_sound() -> None:
    """Raise ValueError, which names the command that helps, where the libraries for sound are not installed."""
    require_video()
    require_audio()
    import av

    if missing := [name for name in _DECODERS if name not in av.codecs_available]:
        raise ValueError(
            f"the sound of videos needs an FFmpeg that has {', '.join(missing)}, and that of av {av.__version__} has "
            "not: pip install --force-reinstall av (its wheels bring a whole one)"
        )


def read_sound_header(data: bytes) -> AudioHeader | None:
    """Read the times of all packets of a video's sound, and its first frame; None where a video has no sound.

    Raises:
        AudioHeaderError: the sound cannot be read, or is over the limits.
    """
    with opened(data, _DECODERS, AudioHeaderError, _NO_VIDEO) as (found, container):
        stream = _sound_of(container)
        if stream is None:
            return None
        begin: int | None = None
        end, first = 0, None
        for number, packet in enumerate(container.demux(stream)):
            if number > MAX_SOUND_PACKETS:
                raise AudioHeaderError("audio_too_large", f"more than {MAX_SOUND_PACKETS} packets")
            if first is None and number < FIRST_PACKETS:
                first = next(iter(stream.codec_context.decode(packet)), None)
            if packet.size and not packet.is_discard:
                if packet.pts is None:
                    raise ValueError("one of its packets has no time")
                begin = packet.pts if begin is None else begin
                end = max(end, packet.pts + max(packet.duration or 0, 0))
        if begin is None:
            return None
        if first is None:
            detail = f"its first {FIRST_PACKETS} packets hold no frame that can be decoded"
            raise AudioHeaderError("unreadable_header", detail)
        samples = round((end - max(begin, 0)) * _unit(stream) * first.sample_rate)
        return check_header(AudioHeader(found.name, samples, first.sample_rate, first.layout.nb_channels))


def read_sound(data: bytes, shape: AudioShape, wanted: int) -> NDArray[np.float32]:
    """Decode the sound of a video: a `ReadMono`.

    Args:
        data: the encoded video.
        shape: what the index says of its sound.
        wanted: samples that are read, from its first one on.

    Returns:
        float32 [wanted], the mean of all channels.

    Raises:
        InvalidAudioError: it is not usable: a pure function of the arguments.
    """
    found = np.zeros(wanted, np.float32)
    end = 0
    try:
        with opened(data, _DECODERS, AudioHeaderError, _NO_VIDEO) as (_, container):
            if (stream := _sound_of(container)) is None:
                raise InvalidAudioError("it has no sound")
            for time, part in _frames(container, stream, shape):
                if time > end + shape.sample_rate // _PAUSES:
                    end = min(time, wanted)
                mono = part[:, : wanted - end].mean(axis=0)
                found[end : end + len(mono)] = mono
                end += len(mono)
                if end == wanted:
                    break
    except AudioHeaderError as error:
        raise InvalidAudioError(str(error)) from error
    if not end or end < wanted - shape.sample_rate // _UNTOLD:
        raise InvalidAudioError(f"it ends after {end} of {shape.samples} samples")
    return found


def _frames(
    container: "InputContainer", stream: "av.AudioStream", shape: AudioShape
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield each frame, float32 [channels, n], with the sample at which it begins by its time."""
    begin: int | None = None
    samples_of_tick = _unit(stream) * shape.sample_rate
    for packet in container.demux(stream):
        if begin is None and packet.size and not packet.is_discard:
            begin = max(packet.pts or 0, 0)
        for frame in stream.codec_context.decode(packet):
            found = frame.sample_rate, frame.layout.nb_channels, frame.format.name
            if found != (shape.sample_rate, shape.channels, "fltp"):
                raise InvalidAudioError(f"a frame has {found}, and in the index it has {shape[1:]}")
            ticks = 0 if frame.pts is None else frame.pts - (begin or 0)
            planes = np.asarray(frame.to_ndarray(), np.float32)
            yield round(ticks * samples_of_tick), planes


def _sound_of(container: "InputContainer") -> "av.AudioStream | None":
    """The stream of sound of a video, if it has any, to be decoded on the thread that calls.

    Raises:
        AudioHeaderError: it is of a codec that is not read, or has too many channels.
    """
    stream = next(iter(container.streams.audio), None)
    if stream is None:
        return None
    context = stream.codec_context
    codec = "unknown" if context is None else context.name
    if codec not in _DECODERS:
        raise AudioHeaderError("unreadable_header", f"its codec is {codec}; {', '.join(SOUND_CODECS)} are read")
    if context.channels > MAX_CHANNELS:
        raise AudioHeaderError("audio_too_large", f"declares {context.channels} channels, limit {MAX_CHANNELS}")
    context.thread_count = 1
    context.thread_type = "NONE"
    return stream


def _unit(stream: "av.AudioStream") -> Fraction:
    """Seconds of a tick. Raises ValueError where a stream has none."""
    if stream.time_base is None:
        raise ValueError("its packets have times without a unit")
    return stream.time_base
