"""What devices can do at most, for the utilisation that metrics tell."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from dataserver.planning.job.fields import PEAK_GIGAFLOPS

PEAK_TFLOPS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "H100 PCIe": 756.5,
        "H100 NVL": 835.5,
        "A100": PEAK_GIGAFLOPS["a800"] / 1000,
        "A800": PEAK_GIGAFLOPS["a800"] / 1000,
        "H100": PEAK_GIGAFLOPS["h100"] / 1000,
        "H800": PEAK_GIGAFLOPS["h100"] / 1000,
        "H200": PEAK_GIGAFLOPS["h200"] / 1000,
        "L40S": 366.5,
    }
)
"""Dense bf16 peaks from NVIDIA's data sheets, by a part of the name that CUDA tells; the first that fits."""


def peak_flops(given_tflops: float | None, device: torch.device) -> float | None:
    """Operations per second of a device: as given, or of a GPU whose name is known; None of anything else."""
    if given_tflops is not None:
        return given_tflops * 1e12
    return known_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def known_peak(name: str) -> float | None:
    """Operations per second of a GPU by its name."""
    return next((1e12 * tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)
