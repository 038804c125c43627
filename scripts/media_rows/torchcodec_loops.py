"""The same clips, sounds and frames by torchcodec on one thread, where it can be imported."""

from dataserver.audio.mel import log_mel
from dataserver.planning.job.fields import HOP, SAMPLE_RATE, Sizing
from dataserver.planning.stream.item_sizes import audio_sizing, video_sizing
from dataserver.planning.stream.video_frames import sampled_frames
from media_rows.files import Array, Stored


def why_not() -> str | None:
    """Why it cannot be imported; None where it can be."""
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def torchcodec_audio(one: Stored, sizing: Sizing) -> Array:
    """A clip, or the sound of a video: decoded, mixed and resampled by it; the same spectrogram."""
    from torchcodec.decoders import AudioDecoder

    audio = audio_sizing(sizing)
    decoder = AudioDecoder(one.data, sample_rate=SAMPLE_RATE, num_channels=1)
    mono = decoder.get_samples_played_in_range(0, audio.max_seconds).data.numpy()[0]
    return log_mel(mono, one.rows, audio.max_frames * HOP, audio.bins)


def torchcodec_frames(one: Stored, sizing: Sizing) -> object:
    """The frames that are sampled of a video, converted and not scaled."""
    from torchcodec.decoders import VideoDecoder

    count = sampled_frames(one.ref.frames, one.ref.microseconds, video_sizing(sizing))
    decoder = VideoDecoder(one.data, num_ffmpeg_threads=1, seek_mode="exact")
    return decoder.get_frames_at([n * one.ref.frames // count for n in range(count)]).data
