"""Limits on what is decoded, in bytes, channels and seconds as they are stored, never in time that it takes.

They are constants of the code and no settings: whether a clip is valid is a pure function of its stored bytes, the same
on every server of a fleet.
"""

from typing import Final

MAX_AUDIO_BYTES: Final = 64 << 20
"""Most bytes that an encoded clip may have."""
MAX_AUDIO_SECONDS: Final = 3600
"""Longest clip. Spectrograms take its first 30 seconds at most; a header that says more than an hour is a mistake, or
worse."""
MAX_CHANNELS: Final = 8
LOUDEST: Final = 1e10
"""Largest sample, where 1 is full scale: room for floats that have the values of 32-bit integers (2^31), and none for
values that overflow in resampling."""
SAMPLE_RATES: Final = (4_000, 384_000)
"""Least and greatest rate. With the longest clip it bounds a decode: 30 s x 384 kHz of 4 bytes, 46 MB."""
