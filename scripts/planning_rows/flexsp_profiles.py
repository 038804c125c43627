"""FlexSP's published models and cluster (arXiv 2412.01523, section 3.2, eq. 11-13), and costs of groups from them.

The paper's constants are milliseconds and MiB with up to ten decimals. They are turned into integers once, here: time
into femtoseconds per token pair, picoseconds per token and nanoseconds per microbatch; memory into bytes (rounded up,
so that nothing is promised that is not there).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

import numpy as np

from dataserver.planning import I64
from dataserver.planning.layouts.grouped.costs import GroupCosts


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices that sequences share.

    Raises:
        ValueError: a field is out of its range.
    """

    num_devices: int
    device_bytes: int
    """Memory of a device for model states and activations."""
    bandwidths: tuple[tuple[int, int], ...]
    """All-to-all bandwidth of a device, bytes/s, for each degree: ((2, ...), (4, ...), ...)."""

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.device_bytes < 1:
            raise ValueError(f"a cluster of {self.num_devices} devices of {self.device_bytes} bytes: both must be >= 1")
        for degree, bandwidth in self.bandwidths:
            if degree < 2 or degree & (degree - 1) or bandwidth < 1:
                raise ValueError(f"bandwidth of degree {degree}: {bandwidth} bytes/s; needs a power of two >= 2, >= 1")


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model's measured constants: alpha1, alpha2, beta1, M_token and M_ms of eq. 11 and 12, and its shape.

    Raises:
        ValueError: a field is out of its range.
    """

    name: str
    quadratic_fs: int
    """Computing, femtoseconds per token squared (alpha1)."""
    linear_ps: int
    """Computing, picoseconds per token (alpha2)."""
    fixed_ns: int
    """Nanoseconds per microbatch, whatever it holds (beta1)."""
    layers: int
    hidden: int
    token_bytes: int
    """Bytes that the activations of a token take."""
    state_bytes: int
    """Parameters, gradients and optimizer states of the whole model, sharded over all devices (ZeRO-3)."""

    def __post_init__(self) -> None:
        for field in ("quadratic_fs", "fixed_ns", "state_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"{self.name}: {field} = {getattr(self, field)} must not be negative")
        for field in ("linear_ps", "layers", "hidden", "token_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}: {field} = {getattr(self, field)} must be at least 1")

    def transfer_ps(self, bandwidth: int) -> int:
        """Picoseconds that one device needs to exchange one token.

        4 all-to-all in forward and in backward, per layer, of bf16.
        """
        return 4 * 2 * self.layers * self.hidden * 2 * 10**12 // bandwidth


def group_costs(
    model: ModelProfile, cluster: Cluster, min_degree: int = 1, max_degree: int | None = None
) -> GroupCosts:
    """Costs of a model's groups of `min_degree` to `max_degree` devices on a cluster.

    The public code of FlexSP drops degree 1, its paper's plans have it; it is allowed here.

    Args:
        model: the constants.
        cluster: the devices.
        min_degree: smallest group, a power of two that divides the cluster.
        max_degree: largest group, a power of two; the largest in the cluster unless given.

    Raises:
        ValueError: no room for activations, a bandwidth is missing, or a degree is impossible.
    """
    devices = cluster.num_devices
    largest = 1 << (devices.bit_length() - 1) if max_degree is None else max_degree
    if min_degree < 1 or min_degree & (min_degree - 1) or devices % min_degree:
        raise ValueError(f"min_degree {min_degree} must be a power of two that divides the {devices} devices")
    if largest & (largest - 1) or not min_degree <= largest <= devices:
        raise ValueError(f"max_degree {largest} must be a power of two from {min_degree} to the {devices} devices")
    degrees = tuple(1 << p for p in range(min_degree.bit_length() - 1, largest.bit_length()))
    known = dict(cluster.bandwidths)
    if missing := [d for d in degrees if d > 1 and d not in known]:
        raise ValueError(f"the cluster has no bandwidth for groups of {missing} devices; give it, or lower max_degree")
    free = cluster.device_bytes - -(-model.state_bytes // devices)
    if free < model.token_bytes:
        raise ValueError(
            f"{model.name} leaves {free} of {cluster.device_bytes} bytes for activations on each of {devices} devices, "
            f"and a token takes {model.token_bytes}: add devices"
        )
    return GroupCosts(
        name=model.name,
        num_devices=devices,
        degrees=degrees,
        device_tokens=free // model.token_bytes,
        quadratic_fs=model.quadratic_fs,
        token_ps=tuple(model.linear_ps + (0 if d == 1 else model.transfer_ps(known[d])) for d in degrees),
        fixed_ns=model.fixed_ns,
    )


def _scaled(decimal: str, factor: int) -> int:
    """A decimal times a factor, rounded up."""
    return -int(-Fraction(decimal) * factor // 1)


_FIXED = {
    # alpha1 and alpha2 in ms, beta1 in ms, layers, hidden, MiB of activations per token
    "7b": ("5.128e-6", "0.1839576", "629.3563", 32, 4096, "4.480441895"),
    "13b": ("9.2852e-6", "0.3060189", "1132.5632", 40, 5120, "4.220439453"),
    "30b": ("15.4262e-6", "0.8035742", "2789.3644", 60, 6656, "3.417381836"),
}
_BILLIONS = {
    "7b-192k": "7.1174",
    "7b-384k": "7.8499",
    "13b-192k": "13.1161",
    "13b-384k": "14.0316",
    "30b-192k": "31.5251",
    "30b-384k": "32.7153",
}
"""Parameters; they grow with the context because its position embeddings do."""


def _profile(name: str) -> ModelProfile:
    alpha1, alpha2, beta1, layers, hidden, token_mib = _FIXED[name.partition("-")[0]]
    return ModelProfile(
        name=name,
        quadratic_fs=_scaled(alpha1, 10**12),
        linear_ps=_scaled(alpha2, 10**9),
        fixed_ns=_scaled(beta1, 10**6),
        layers=layers,
        hidden=hidden,
        token_bytes=_scaled(token_mib, 2**20),
        state_bytes=_scaled(_BILLIONS[name], 16 * 2**30),  # 16 bytes a parameter; the code's billion is 2^30
    )


PROFILES: Mapping[str, ModelProfile] = MappingProxyType({name: _profile(name) for name in _BILLIONS})
"""The paper's models, at its two context lengths."""

A100_CLUSTER = Cluster(
    num_devices=64,
    device_bytes=30 * 2**30,
    bandwidths=tuple(
        (degree, _scaled(mib_per_ms, 2**20 * 1000))
        for degree, mib_per_ms in ((2, "119.54"), (4, "104.07"), (8, "96.5"), (16, "10.33"), (32, "5.94"), (64, "4.87"))
    ),
)
"""The paper's 8 nodes of 8 A100-40GB (30 GiB usable), NVLink inside, 400 Gb/s InfiniBand between."""


def usable_lengths(lengths: I64, context: int, multiple: int = 128) -> I64:
    """The paper's data filter: lengths rounded up to a multiple, those above `context - multiple` left out.

    The multiple is 2 x the largest degree. Global batch i of the paper is entries 512 i to 512 (i + 1) of the result.

    Args:
        lengths: int [n], tokens.
        context: the context length, 192_000 or 384_000 in the paper.
        multiple: what lengths are padded to.

    Returns:
        int64 [at most n], in the order given.
    """
    padded = -(-lengths.astype(np.int64) // multiple) * multiple
    fitting: I64 = padded[padded <= context - multiple]
    return fitting
