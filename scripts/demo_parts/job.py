"""The jobs of the demo: tiny models, and what their passes cost."""

from collections.abc import Mapping, Sequence
from typing import Any

# Measured with the tiny models on one core of a CPU; the planner needs the ratios only.
COSTS = {
    "encoder": {"microbatch_ns": 350_000, "linear_ps": 6_600_000, "quadratic_fs": 6_300_000, "backward_percent": 160},
    "backbone": {
        "microbatch_ns": 600_000,
        "linear_ps": 10_000_000,
        "quadratic_fs": 10_000_000,
        "backward_percent": 180,
    },
    "generator": {
        "microbatch_ns": 700_000,
        "linear_ps": 10_000_000,
        "quadratic_fs": 8_300_000,
        "backward_percent": 150,
    },
}
GROUPS: Mapping[str, Any] = {
    "max_degree": 2,
    "exchange": [{"degree": 2, "unit_ps": 3_000_000}],
}
"""Options of the grouped layout: the tiny backbone has two heads of keys and values."""
ROOM: Mapping[str, int] = {"budget_bytes": 320_000, "unit_bytes": 1_000}
"""Memory for tokens of a rank: the longest samples need a group of two."""
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "pipelined": {"encoder": {}, "backbone": {"dp": 2, "pp": 2}, "generator": {}},
    "colocated": {kind: {"dp": 2} for kind in ("encoder", "backbone", "generator")},
    "contrastive": {"image": {"dp": 2}, "text": {"dp": 2, "pp": 2}},
    "grouped": {"encoder": {}, "backbone": {"dp": 4}, "generator": {}},
}
"""Degrees of each module in each layout."""
TOWERS: Mapping[str, Mapping[str, int]] = {"image": COSTS["encoder"], "text": COSTS["backbone"]}
"""Costs of towers, which are the blocks of these."""


MODALITIES = ("image", "image,audio", "image,video", "image,audio,video")
"""What the demo can read."""
MEDIA: Mapping[str, Mapping[str, Any]] = {
    "audio": {"bins": 80},
    "video": {"max_frames": 16, "min_pixels": 4 * 28**2, "max_pixels": 36 * 28**2},
}
"""How what is not an image is sized."""
DATASETS: Mapping[str, str] = {"image": "demo", **{m: m for m in MEDIA}}
"""The dataset of each modality, by its name in jobs."""


def job_spec(
    steps: int, layout: str = "pipelined", modalities: Sequence[str] = ("image",), dp: int | None = None
) -> dict[str, Any]:
    """The demo's job: image-text pairs, most of them understood, 40 % generated. Servers fill in the rest.

    Towers instead compare the pairs, in two contrastive batches a step. With more modalities each has a dataset and an
    encoder, and nothing is generated.

    Args:
        steps: of the job.
        layout: a key of `LAYOUTS`.
        modalities: that are read, images first.
        dp: of all modules, with 16 samples a step for each; by default as `LAYOUTS` has it.
    """
    degrees = LAYOUTS[layout]
    of_layout: dict[str, Any] = {}
    options: dict[str, Any] = {"kind": layout}
    if layout == "contrastive":
        of_layout["contrastive_batch"] = 16
        modules = [{"name": m, "kind": "tower", "modality": m, **degrees[m], "cost": TOWERS[m]} for m in degrees]
        options["microbatches"] = 2
    elif len(modalities) > 1 or dp is not None:
        encoders = [{"name": m, "kind": "encoder", "modality": m, **degrees["encoder"]} for m in modalities]
        modules = [{**encoder, "cost": COSTS["encoder"]} for encoder in encoders]
        modules.append({"name": "backbone", "kind": "backbone", **degrees["backbone"], "cost": COSTS["backbone"]})
    else:
        of_layout["generation"] = {"ratio": "0.4", "query_tokens": 16}
        modules = [{"name": kind, "kind": kind, **degrees[kind], "cost": COSTS[kind]} for kind in degrees]
    if layout == "grouped":
        options |= GROUPS
        modules[1]["memory"] = ROOM
    if dp is not None:
        modules = [{**module, "dp": dp} for module in modules]
    return {
        "stream": {
            "datasets": [{"name": DATASETS[m]} for m in modalities],
            "tokenizer": {"name": "bytes"},
            "sizing": {"patch": 14, "merge": 2, "max_patches": 144, **{m: MEDIA[m] for m in modalities if m in MEDIA}},
            "seq_len": 512,
            "packing": {"enabled": False},
            "global_batch": 32 if dp is None else 16 * dp,
            **of_layout,
            "shuffle_window": 4,
        },
        "execution": {"modules": modules, "layout": options, "microbatch": 1, "end": {"steps": steps}},
    }
