"""An encoder by its formulas: one picture at a time, row by row. Sizes and names are those of our image encoder."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from models.formulas import Values, attention, gated, layer_norm, linear, mlp, rms_norm, same, turned
from torch import Tensor

from trainclient.models.encoder import EncoderConfig


def shares(scaling: str, side: int, size: int) -> list[list[float]]:
    """Of each of `size` positions, how much it has of each of `side` learned ones."""
    return [_share(scaling, side, size, n) for n in range(size)]


def _share(scaling: str, side: int, size: int, n: int) -> list[float]:
    if scaling in ("antialias", "smooth"):
        stretched, centre, cubic = max(1.0, side / size), (n + 0.5) * side / size, scaling == "smooth"
        found = [_weight((at + 0.5 - centre) / stretched, -0.5 if cubic else None) for at in range(side)]
        return [weight / sum(found) for weight in found]
    found = [0.0] * side
    if scaling == "nearest":
        found[n * side // size] = 1.0
        return found
    corners = scaling == "bilinear"
    centre = n * (side - 1) / max(1, size - 1) if corners else (n + 0.5) * side / size - 0.5
    for at in range(math.floor(centre) - 1, math.floor(centre) + 3):
        found[min(max(at, 0), side - 1)] += _weight(at - centre, None if corners else -0.75)
    return found


def _weight(x: float, cubic: float | None) -> float:
    """What something at a distance counts: less and less linearly, or by Keys' cubic of a parameter."""
    x = abs(x)
    if cubic is None:
        return max(0.0, 1 - x)
    if x < 1:
        return (cubic + 2) * x**3 - (cubic + 3) * x**2 + 1
    return cubic * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def encoder_hidden(config: EncoderConfig, p: Values, picture: Tensor) -> list[Tensor]:
    """What each layer makes of the patches of a picture, uint8 [height, width, 3]: [rows, columns, width] each."""
    patch, width, before = config.patch, config.width, int(config.class_token) * (1 + config.registers)
    rows, columns = picture.shape[0] // patch, picture.shape[1] // patch
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    pixels = picture.to(torch.float64) / 127.5 - 1
    cut = [pixels[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch].flatten() for r, c in cells]
    x = linear(torch.stack(cut).repeat(1, 1 + config.second_frame), p, "patch_embed", bias=config.patch_bias)
    if config.position_grid:
        side, scaling = config.position_grid, config.position_scaling or "bicubic"
        table = p["position_embed.weight"][int(config.class_token) :].view(side, side, width)
        down, across = (torch.tensor(shares(scaling, side, n), dtype=torch.float64) for n in (rows, columns))
        x = x + torch.einsum("ri,cj,ijw->rcw", down, across, table).flatten(0, 1)
    if config.class_token:
        x = torch.cat([(p["class_embed"] + p["position_embed.weight"][0])[None], x])
        x = torch.cat([x[:1], p["register_embed"], x[1:]]) if config.registers else x
        x = layer_norm(x, p, "input_norm", config.norm_eps) if config.class_norm else x
    turn: Callable[[Tensor], Tensor] = same
    if not config.class_token and (config.rotary or not config.position_grid):
        pairs = width // config.heads // 4  # of each axis
        angles = [[at * 1e4 ** (-n / pairs) for at in cell for n in range(pairs)] for cell in cells]
        turn = partial(turned, angles=angles)
    found, everything = [], [[True] * len(x)] * len(x)
    reach = config.merge * config.window
    of = [(row // reach, column // reach) for row, column in cells] if reach else []
    for layer in range(config.layers):
        sees = [[a == b for b in of] for a in of] if of and layer not in config.global_layers else everything
        x = _encoder_block(config, p, f"layers.{layer}", x, sees, turn)
        found.append(x[before:].view(rows, columns, width))
    return found


def _encoder_block(
    config: EncoderConfig, p: Values, name: str, x: Tensor, sees: list[list[bool]], turn: Callable[[Tensor], Tensor]
) -> Tensor:
    mixed = attention(
        encoder_norm(config, p, f"{name}.attention_norm", x),
        p,
        f"{name}.attention",
        config.width // config.heads,
        sees,
        turn,
        biases=(config.query_bias, True),
    )
    x = x + (mixed * p[f"{name}.attention_scale"] if config.layer_scale else mixed)
    normed = encoder_norm(config, p, f"{name}.mlp_norm", x)
    made = (gated if config.gated else mlp)(normed, p, f"{name}.mlp", config.activation)
    return x + (made * p[f"{name}.mlp_scale"] if config.layer_scale else made)


def encoder_norm(config: EncoderConfig, p: Values, name: str, x: Tensor) -> Tensor:
    if config.rms_norms:
        return rms_norm(x, p[f"{name}.weight"], config.norm_eps)
    return layer_norm(x, p, name, config.norm_eps)


def encoder_rows(config: EncoderConfig, p: Values, pictures: Sequence[Tensor]) -> Tensor:
    """The rows of all pictures, [blocks, row_width]."""
    return torch.cat([_rows(config, p, encoder_hidden(config, p, picture)) for picture in pictures])


def blocks_of(x: Tensor, merge: int) -> Tensor:
    """Features [rows, columns, width] by a pixel shuffle: merge x merge of them beside each other, [blocks, ...]."""
    shuffled = F.pixel_unshuffle(x.permute(2, 0, 1), merge)  # channels slowest
    return shuffled.unflatten(0, (x.shape[2], merge**2)).permute(2, 3, 1, 0).flatten(2).flatten(0, 1)


def _rows(config: EncoderConfig, p: Values, hidden: list[Tensor]) -> Tensor:
    x, merge, kind = hidden[-1], config.merge, config.projector or "merger"
    if kind not in ("mlp", "normed_mlp"):
        x = encoder_norm(config, p, "merger_norm", x)
    if kind == "pool":
        pooled = F.avg_pool2d(x.permute(2, 0, 1), merge).flatten(1).T
        made = linear(rms_norm(pooled, 1 + p["merger.norm.weight"], config.norm_eps), p, "merger.linear", bias=False)
    elif kind == "linear":
        made = linear(blocks_of(x, merge), p, "merger", bias=False)
    elif kind == "normed_mlp":
        made = mlp(layer_norm(blocks_of(x, merge), p, "merger.norm", 1e-5), p, "merger.mlp")
    else:
        made = mlp(blocks_of(x, merge), p, "merger")
    for n, layer in enumerate(config.deepstack):
        normed = layer_norm(blocks_of(hidden[layer], merge), p, f"deepstack.{n}.norm", config.norm_eps)
        made = torch.cat([made, mlp(normed, p, f"deepstack.{n}.mlp")], 1)
    return made
