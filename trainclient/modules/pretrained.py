"""Modules that start from checkpoints: the sizes of a checkpoint, fitted to a job."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from dataserver.planning.job.fields import TileChoice
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.stream.item_sizes import audio_sizing, video_sizing
from trainclient.models.audio_encoder import AudioEncoderConfig
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.generator import GeneratorConfig
from trainclient.models.towers import ImageTowerConfig, TextTowerConfig

Sizes = EncoderConfig | AudioEncoderConfig | BackboneConfig | GeneratorConfig

WHAT: Final = {EncoderConfig: "an encoder", AudioEncoderConfig: "an encoder of audio", BackboneConfig: "a backbone"}
"""What a checkpoint is, in words."""


_MOST_FRAMES: Final = 2
"""Frames of a patch of a video."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """How a kind of module starts from a checkpoint."""

    source: type[EncoderConfig] | type[AudioEncoderConfig] | type[BackboneConfig]
    """The model of the checkpoint."""
    sizes: Callable[[Any, JobSpec, int], Sizes]
    """Sizes of the module, given those of the checkpoint, the job and a width as in `Family.sizes`; ValueError says
    what the weights have or lack, as the end of a sentence about them."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Its parameters that have other names in the checkpoint."""


def pretrained_encoder(found: EncoderConfig, job: JobSpec, width: int) -> Sizes:
    """An encoder; a tower without a merger gets one that begins untrained."""
    if found.is_bare:
        found = replace(found, merge=job.stream.sizing.merge, output_dim=width)
    return _fitting(found, job, width)


def pretrained_audio(found: AudioEncoderConfig, job: JobSpec, width: int) -> Sizes:
    """An encoder of audio; Whisper's gets a projector that begins untrained."""
    audio = audio_sizing(job.stream.sizing)
    if found.bins != audio.bins:
        raise ValueError(f"have bins {found.bins}, and the job's sizing.audio.bins is {audio.bins}; set it to that")
    if found.positions * 2 < audio.max_frames:
        raise ValueError(
            f"know {found.positions} positions, and clips of the job have up to {audio.max_frames // 2}; lower "
            "sizing.audio.max_seconds"
        )
    if found.merge == 1 and found.output_dim == found.width:
        return replace(found, merge=audio.merge, output_dim=width)
    if (found.merge, found.output_dim) != (audio.merge, width):
        raise ValueError(
            f"have merge {found.merge} and a projector to width {found.output_dim}, and the job sizing.audio.merge "
            f"{audio.merge} and a backbone of width {width}; they must be the same"
        )
    return found


def pretrained_video(found: EncoderConfig, job: JobSpec, width: int) -> Sizes:
    """An encoder of videos, such as the tower of Qwen2-VL."""
    if found.second_frame != spans_two_frames(job):
        frames = 1 + found.second_frame
        raise ValueError(f"have patches of {frames} frames; set the job's sizing.video.temporal_patch to that")
    return pretrained_encoder(found, job, width)


def spans_two_frames(job: JobSpec) -> bool:
    """Whether patches of videos have two frames; ValueError where they have more, which no encoder knows."""
    frames = video_sizing(job.stream.sizing).temporal_patch
    if frames > _MOST_FRAMES:
        raise ValueError(f"sizing.video.temporal_patch is {frames}; encoders of videos here take 1 or {_MOST_FRAMES}")
    return frames == _MOST_FRAMES


def pretrained_image_tower(found: EncoderConfig, job: JobSpec, width: int) -> Sizes:
    """An image tower, whose projection begins untrained."""
    if found.class_token or found.layer_scale:
        raise ValueError("have a class token, as CLIP has, and image towers none; give it those of SigLIP or Qwen2-VL")
    if found.projector or found.window:
        raise ValueError("have a projector or windows, and image towers have neither; give it those of SigLIP")
    merge = job.stream.sizing.merge
    return _fitting(ImageTowerConfig(**{**sizes_of(found), "merge": merge, "output_dim": width}), job, width)


def pretrained_backbone(found: BackboneConfig, job: JobSpec, width: int) -> BackboneConfig:
    """A backbone without query tokens."""
    del width
    _require_reach(found, job)
    return found


def pretrained_text_tower(found: BackboneConfig, job: JobSpec, width: int) -> Sizes:
    """A text tower, whose projection begins untrained."""
    special = ("sections", "embed_scale", "windowed_rotary_base", "deepstack", "two_way_images")
    if has := [name for name in special if getattr(found, name)]:
        raise ValueError(f"have {', '.join(has)}, and text towers none; give it those of Llama, Qwen2 or Qwen3")
    _require_reach(found, job)
    return TextTowerConfig(**sizes_of(replace(found, tied=False)), output_dim=width)  # it has no head


def sizes_of(sizes: EncoderConfig | BackboneConfig) -> dict[str, Any]:
    """Return the sizes of a module by their names."""
    return {field.name: getattr(sizes, field.name) for field in fields(sizes)}


def _require_reach(found: BackboneConfig, job: JobSpec) -> None:
    """Raise ValueError unless weights know all tokens and all positions that the job has."""
    tokenizer = job.stream.tokenizer
    if found.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"know {found.vocab_size} tokens, and the job's tokenizer {tokenizer.name} has {tokenizer.vocab_size}; "
            "give the job the tokenizer of the weights, or set `vocabulary` of the module: it then learns the others"
        )
    if found.longest < job.stream.seq_len:
        raise ValueError(
            f"know {found.longest} positions (max_position_embeddings), and the job's seq_len is {job.stream.seq_len}; "
            "lower seq_len, take weights for longer sequences, or set `positions` of the module: it then learns them"
        )


def _fitting(found: EncoderConfig, job: JobSpec, width: int) -> Sizes:
    sizing = job.stream.sizing
    if found.line_ends != (sizing.tiles is not None and sizing.tiles.choice is TileChoice.PINPOINTS):
        raise ValueError(
            f"{'have' if found.line_ends else 'have no'} rows for the ends of lines over tiles (LLaVA-OneVision), "
            "which go with sizing.rule tiles and tiles.choice pinpoints alone; take other weights or another rule"
        )
    wanted = {"patch": sizing.patch, "merge": sizing.merge, "output_dim": width}
    has = {key: getattr(found, key) for key in wanted}
    different = [f"{key} {has[key]}, not {value}" for key, value in wanted.items() if has[key] != value]
    if different:
        raise ValueError(
            f"have {', '.join(different)}; patch and merge are those of the job's sizing, output_dim is the width of "
            "the backbone"
        )
    return found
