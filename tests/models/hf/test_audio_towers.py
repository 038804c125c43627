"""Audio towers against transformers: rows and gradients of Whisper's and Qwen2-Audio's, weights in and out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2AudioEncoderConfig, WhisperConfig
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from trainclient.models.audio_encoder import AudioEncoder, AudioEncoderConfig, groups_of_like_lengths, sinusoids
from trainclient.models.hf import export_pretrained, load_into, load_pretrained
from trainclient.models.hf.audio_towers import WHISPER

SIZES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 80,
}  # fmt: skip
OUTPUT = 24


def randomised(network: Any) -> Any:
    """Random values everywhere: what is constant at first hides mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


def mel(*frames: int) -> tuple[Tensor, Tensor]:
    ends = torch.tensor([0, *frames]).cumsum(0)
    return torch.randn(int(ends[-1]), 80, generator=torch.Generator().manual_seed(2)), ends


def padded(spectrogram: Tensor) -> Tensor:
    """[1, bins, 3000], of silence behind the clip's end."""
    silent = spectrogram.new_full((3000, 80), -1.5)
    silent[: len(spectrogram)] = spectrogram
    return silent.T[None]


def whisper(folder: Path, prefix: str) -> WhisperEncoder:
    network = randomised(WhisperEncoder(WhisperConfig(**SIZES, attn_implementation="eager")))
    folder.mkdir(exist_ok=True)
    save_file({prefix + name: t.contiguous() for name, t in network.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper", **SIZES}))
    return network


def ours(folder: Path) -> AudioEncoder:
    found = load_pretrained(folder)
    network = AudioEncoder(found.config)
    missing = load_into(network, found.state)
    assert missing in ([], ["projector.weight", "projector.bias"])
    if missing:
        nn.init.eye_(network.projector.weight)
        nn.init.zeros_(network.projector.bias)
    return network


def check_gradients(network: AudioEncoder, theirs: WhisperEncoder) -> None:
    """Of all weights that are trained in both, by the names that they have there."""
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    wanted.pop("embed_positions.weight", None)
    entries = {entry.theirs: entry for entry in WHISPER.entries(network.config)}
    assert len(wanted) == len(entries) - 1 == 7 + 15 * network.config.layers - 1
    for name, expected in wanted.items():
        found = entries[name].joined(gradients)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()), msg=name)


def test_convolutions_pad_clips_to_less_than_twice_their_length() -> None:
    assert groups_of_like_lengths([3000, 5, 9, 2000, 11]) == [[1, 2], [4], [3, 0]]
    assert groups_of_like_lengths([]) == [[]]
    network = AudioEncoder(AudioEncoderConfig(1, 8, 1, 8, bins=80, merge=1, output_dim=8))
    seen: list[int] = []
    network.conv_in.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0] * inputs[0].shape[2]))
    values, ends = mel(*[5] * 100, 601)
    network(values, ends, torch.tensor([0, *range(2, 201, 2), 500]))
    assert seen == [500, 601]


@pytest.mark.parametrize("prefix", ["", "model.encoder.", "encoder."])
def test_rows_and_gradients_are_those_of_whisper(tmp_path: Path, prefix: str) -> None:
    theirs = whisper(tmp_path, prefix)
    network = ours(tmp_path)
    values, ends = mel(3000, 3000)
    rows = network(values, ends, torch.tensor([0, 1500, 3000]))
    expected = torch.cat([theirs(padded(clip)).last_hidden_state[0] for clip in values.split(3000)])
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
    if prefix:
        return
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (rows * weight).sum().backward()
    (expected * weight).sum().backward()
    check_gradients(network, theirs)


def test_rows_of_short_clips_are_those_of_qwen2_audio(tmp_path: Path) -> None:
    settings = Qwen2AudioEncoderConfig(**SIZES, attn_implementation="eager")
    theirs = randomised(Qwen2AudioEncoder(settings))
    projector = randomised(nn.Linear(32, OUTPUT))
    stored = {f"audio_tower.{name}": t.contiguous() for name, t in theirs.state_dict().items()}
    stored |= {f"multi_modal_projector.linear.{name}": t for name, t in projector.state_dict().items()}
    stored["language_model.model.norm.weight"] = torch.ones(OUTPUT)
    save_file(stored, tmp_path / "model.safetensors")
    whole = {"model_type": "qwen2_audio", "audio_config": SIZES, "text_config": {"hidden_size": OUTPUT}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    network = ours(tmp_path)
    assert (network.config.merge, network.config.output_dim) == (2, OUTPUT)
    expected, served, positions = [], [], []
    for frames in (3, 4, 57, 2999, 3000):
        clip, _ = mel(frames)
        count = (frames - 1) // 2 + 1
        whole_clip = padded(clip)
        mask = torch.full((1, 1, 1500, 1500), 0.0).masked_fill(torch.arange(1500) >= count, -torch.inf)
        hidden = theirs(whole_clip, attention_mask=mask).last_hidden_state[0]
        expected.append(projector(hidden[: (count - 2) // 2 + 1]))
        served.append(whole_clip[0].T[: min(2 * count + 1, 3000)])
        positions.append(count)
    ends = [torch.tensor([0, *n]).cumsum(0) for n in (list(map(len, served)), positions)]
    rows = network(torch.cat(served), *ends)
    torch.testing.assert_close(rows, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_an_encoder_is_exported_as_whisper(tmp_path: Path) -> None:
    theirs = whisper(tmp_path / "base", "model.encoder.")
    found = load_pretrained(tmp_path / "base")
    left = export_pretrained(tmp_path / "out", found.config, {**found.state, "projector.bias": torch.zeros(32)})
    assert left == ["projector.bias"]
    again = WhisperEncoder.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    values = padded(mel(3000)[0])
    assert torch.equal(again(values).last_hidden_state, theirs(values).last_hidden_state)


def test_no_clip_at_all_still_has_gradients(tmp_path: Path) -> None:
    whisper(tmp_path, "")
    network = ours(tmp_path)
    rows = network(*mel(), torch.zeros(1, dtype=torch.int64))
    assert rows.shape == (0, 32)
    rows.sum().backward()
    assert all(p.grad is not None for p in network.parameters() if p.requires_grad)


def test_fresh_positions_are_whispers(tmp_path: Path) -> None:
    fresh = WhisperEncoder(WhisperConfig(**SIZES)).embed_positions.weight
    torch.testing.assert_close(sinusoids(torch.Size((1500, 32))), fresh, rtol=0, atol=2e-4)
