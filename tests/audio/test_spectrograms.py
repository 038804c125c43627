"""Spectrograms are those of Whisper's feature extractor, whatever the format, rate and channels."""

import numpy as np
import pytest
from audio.clips import clip, encoded, sound

from dataserver.audio import AudioShape, decode_mel, read_audio_header
from dataserver.planning.job.fields import AudioSizing, clip_frames, clip_positions, served_frames

pytest.importorskip("soundfile", reason="the extra audio is not installed")
CHANGED_BY_LOSS = 0.05
"""A lossy codec changes a spectrogram by less on average."""


def mel_of(data: bytes, sizing: AudioSizing) -> np.ndarray:
    header = read_audio_header(data)
    shape = AudioShape(header.samples, header.sample_rate, header.channels)
    frames = served_frames(clip_positions(clip_frames(shape.samples, shape.sample_rate, sizing)), sizing)
    out = np.full((frames, sizing.bins), np.nan, np.float32)
    assert decode_mel(data, shape, sizing, out)
    return out


@pytest.mark.parametrize(("bins", "num_samples"), [(80, 48_077), (128, 479_841), (128, 20), (80, 480_900)])
def test_values_are_those_of_transformers(bins, num_samples):
    extractor = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=bins)
    samples = sound(31, 16_000)[:num_samples]
    theirs = extractor(samples[:, 0], sampling_rate=16_000, return_tensors="np", return_attention_mask=True)
    expected, attended = theirs.input_features[0].T, int(theirs.attention_mask.sum())
    data = encoded(samples, 16_000, "float")
    padded = mel_of(data, AudioSizing(bins=bins, merge=1, padded=True))
    own = mel_of(data, AudioSizing(bins=bins))
    assert padded.shape == (3000, bins)
    np.testing.assert_allclose(padded, expected, atol=1e-4)
    np.testing.assert_allclose(own, expected[: len(own)], atol=1e-4)
    assert len(own) == min((max(attended, 3) + 1) // 2 * 2 + 1, 3000)


def test_other_rates_and_channels_become_the_same_sound():
    expected = mel_of(clip(1.5, "float"), AudioSizing())
    wide = np.repeat(sound(1.5, 96_000), 8, axis=1) * np.linspace(0.5, 1.5, 8, dtype=np.float32)  # mean 1
    for data, tolerance in ((encoded(wide, 96_000, "float"), 0.2), (clip(1.5, "flac"), 0.01)):
        assert np.abs(mel_of(data, AudioSizing()) - expected).mean() < tolerance


@pytest.mark.parametrize("name", ["mp3", "vorbis", "opus"])
def test_lossy_formats(name):
    expected = mel_of(clip(2, "float", 48_000), AudioSizing(bins=80))
    found = mel_of(clip(2, name, 48_000), AudioSizing(bins=80))
    below = slice(0, 40)  # encoders leave out high noise
    assert np.abs(found - expected)[:, below].mean() < CHANGED_BY_LOSS


def test_silence_is_a_clip():
    assert np.unique(mel_of(encoded(np.zeros((8000, 1), np.float32), 8000), AudioSizing())).tolist() == [-1.5]


def test_values_have_few_bits():
    steps = mel_of(clip(1), AudioSizing()) * 2**16
    assert np.array_equal(steps, np.round(steps))


@pytest.mark.parametrize(
    ("frames", "positions"), [(3, 2), (4, 2), (5, 3), (299, 150), (300, 150), (2999, 1500), (3000, 1500)]
)
def test_positions_are_those_of_the_convolutions(frames, positions):
    torch = pytest.importorskip("torch")
    sizes = [torch.nn.Conv1d(1, 1, 3, stride, 1) for stride in (1, 2)]
    assert torch.nn.Sequential(*sizes)(torch.zeros(1, 1, frames)).shape[2] == positions == clip_positions(frames)


def test_sizing_that_leaves_a_clip_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"audio.merge is 3; at most 2 .* set padded to true"):
        AudioSizing(merge=3)
    assert AudioSizing(merge=60, padded=True).max_frames == 3000
