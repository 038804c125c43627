"""A decoder by its formulas: one sequence at a time. Sizes and names are those of our backbone."""

from dataclasses import dataclass
from functools import partial

import torch
from models.formulas import Angles, Values, attention, gated, rms_norm, same, turned
from torch import Tensor

from trainclient.models.backbone_block import BackboneConfig


@dataclass(frozen=True, eq=False)
class Tokens:
    """One sequence of a backbone: all that stands in it."""

    ids: list[int]
    labels: list[int]
    positions: list[tuple[int, ...]]
    """Of each token, one, or in time, height and width."""
    images: list[int]
    """The image of each token, or -1."""

    def sees(self, config: BackboneConfig, layer: int) -> list[list[bool]]:
        """Which tokens each of them sees in a layer."""
        rows, window = range(len(self.ids)), 0 if layer in config.global_layers else config.window
        return [[self._sees(config, a, b) and not (window and a - b >= window) for b in rows] for a in rows]

    def _sees(self, config: BackboneConfig, a: int, b: int) -> bool:
        return b <= a or (config.two_way_images and self.images[a] == self.images[b] >= 0)

    def angles(self, config: BackboneConfig, layer: int) -> Angles:
        """Of each token in a layer."""
        pairs, windowed = config.head_size // 2, config.window and layer not in config.global_layers
        base, stretched = config.rotary_base, 1.0 if config.rotary_scaling is None else config.rotary_scaling.factor
        if windowed and config.windowed_rotary_base:
            base, stretched = config.windowed_rotary_base, 1.0
        axes = _axes(config, pairs)
        return [[at[axes[n]] * base ** (-n / pairs) / stretched for n in range(pairs)] for at in self.positions]


def _axes(config: BackboneConfig, pairs: int) -> list[int]:
    """The axis by whose position each pair turns."""
    if config.sections is None:
        return [0] * pairs
    counts = config.sections.pairs
    if not config.sections.interleaved:
        return [0] * counts[0] + [1] * counts[1] + [2] * counts[2]
    found = [0] * pairs
    for axis in (1, 2):
        found[axis : 3 * counts[axis] : 3] = [axis] * counts[axis]
    return found


def backbone_loss(config: BackboneConfig, p: Values, sequence: Tokens, rows: Tensor) -> Tensor:
    """The sum of the losses of a sequence; `rows` [E, image_width] are those of the tokens of its images."""
    offset, scale, width = float(config.offset_norms), config.embed_scale or 1.0, config.width
    spots = [n for n, image in enumerate(sequence.images) if image >= 0]

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, offset + p[f"{name}.weight"], config.norm_eps)

    def with_rows(x: Tensor, part: int, *, added: bool) -> Tensor:
        lines = list(x.unbind())
        for spot, row in zip(spots, rows[:, part * width : (part + 1) * width], strict=True):
            lines[spot] = lines[spot] + row if added else row
        return torch.stack(lines)

    post_norm = norm if config.post_norms else same
    x = with_rows(p["embed.weight"][sequence.ids] * scale, 0, added=False)
    for layer in range(config.layers):
        name, sees, angles = f"layers.{layer}", sequence.sees(config, layer), sequence.angles(config, layer)
        mixed = attention(
            norm(x, f"{name}.attention_norm"),
            p,
            f"{name}.attention",
            config.head_size,
            sees,
            partial(turned, angles=angles),
            norm if config.head_norms else same,
            config.score_scale,
            (config.qkv_bias, config.output_bias),
        )
        x = x + post_norm(mixed, f"{name}.attention_post_norm")
        made = gated(norm(x, f"{name}.mlp_norm"), p, f"{name}.mlp", config.activation or "silu", bias=False)
        x = x + post_norm(made, f"{name}.mlp_post_norm")
        if layer < config.deepstack:
            x = with_rows(x, layer + 1, added=True)
    logits = norm(x, "norm") @ p["embed.weight" if config.tied else "head.weight"].T
    losses = [line.exp().sum().log() - line[n] for line, n in zip(logits, sequence.labels, strict=True) if n >= 0]
    return torch.stack(losses).sum()
