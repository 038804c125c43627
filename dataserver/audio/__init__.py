"""Encoded audio: bytes in, log-mel spectrograms out. `formats` has a line for each format that is read.

soundfile (libsndfile) and soxr, the extra `audio`, are imported where they are used.
"""

from dataserver.audio.decoding import (
    AUDIO_VERSION,
    AudioShape,
    InvalidAudioError,
    ReadMono,
    audio_fault_of,
    decode_mel,
)
from dataserver.audio.digest import audio_digest
from dataserver.audio.formats import AUDIO_FORMAT_NAMES, AUDIO_SUFFIXES, audio_format_of
from dataserver.audio.header import AudioHeader, AudioHeaderError, check_header, read_audio_header, require_audio
from dataserver.audio.limits import MAX_AUDIO_SECONDS, MAX_CHANNELS, SAMPLE_RATES
from dataserver.planning.job.fields import MAX_CLIP_SECONDS

__all__ = [
    "AUDIO_FORMAT_NAMES",
    "AUDIO_SUFFIXES",
    "AUDIO_VERSION",
    "MAX_AUDIO_SECONDS",
    "MAX_CHANNELS",
    "MAX_CLIP_SECONDS",
    "SAMPLE_RATES",
    "AudioHeader",
    "AudioHeaderError",
    "AudioShape",
    "InvalidAudioError",
    "ReadMono",
    "audio_digest",
    "audio_fault_of",
    "audio_format_of",
    "check_header",
    "decode_mel",
    "read_audio_header",
    "require_audio",
]
