"""Measured costs of modules on one kind of device: what `trainclient profile` writes and the solver reads."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from dataserver.planning.jobspec import MAX_TEXT_BYTES, Cost, ModelSize, SpecModel, TextError, parse_yaml
from trainclient.orchestrate.cluster import BOARDS, Cluster
from trainclient.orchestrate.costs import CostTable, computed_cost, with_reductions
from trainclient.orchestrate.networks import Network


class ProfileError(ValueError):
    """A profile that cannot be read, or is not of this model or cluster."""


class MeasuredCost(SpecModel):
    """A module at one degree."""

    tp: int = Field(ge=1)
    """Devices that share its layers; of these one was measured, without the sums over its peers."""
    cost: Cost
    """Of the whole module, trained; `backward_percent` as it was measured."""
    error_percent: float
    """Median of how far times are from the cost."""


class MeasuredModule(SpecModel):
    """A module as it was measured."""

    name: str
    size: dict[str, int | bool]
    """The fields of `ModelSize`."""
    degrees: tuple[MeasuredCost, ...] = Field(min_length=1)


class Profile(SpecModel):
    """What was measured on one device."""

    gpu: str
    """Kind of GPU, or what the device is called if it is of no known kind."""
    device: str
    """What it is called."""
    dtype: str
    modules: tuple[MeasuredModule, ...]


def read_profile(path: Path) -> Profile:
    """A profile from its file.

    Raises:
        ProfileError: it cannot be read, or is no profile.
    """
    try:
        with path.open("rb") as file:
            return Profile.model_validate(parse_yaml(file.read(MAX_TEXT_BYTES + 1)))
    except OSError as error:
        raise ProfileError(f"the profile {path} cannot be read: {error.strerror}") from None
    except TextError as error:
        raise ProfileError(f"the profile {path} cannot be used: {error}") from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4])
        raise ProfileError(f"{path} is no profile ({problems}); `trainclient profile` writes one") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as YAML."""
    path.write_text(yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False))


def costs_of(profile: Profile, networks: Sequence[Network], cluster: Cluster) -> CostTable:
    """Costs by module and degree, with the sums over peers, which follow from the cluster's bandwidth.

    A degree that was not measured has the cost of degree 1 in the ratio that operations and widths have.

    Raises:
        ProfileError: it is of another kind of GPU, or of other models; says which.
    """
    if profile.gpu != cluster.gpu:
        known_kind = f", set --gpu {profile.gpu}" if profile.gpu in BOARDS else ""
        raise ProfileError(
            f"the profile is of {profile.gpu} ({profile.device}), and the cluster has {cluster.gpu}; measure it there "
            f"with `trainclient profile`{known_kind}, or leave --profile out"
        )
    known = {m.name: m for m in profile.modules}
    table: dict[tuple[str, int], Cost] = {}
    for network in networks:
        measured = known.get(network.name)
        if measured is None:
            raise ProfileError(
                f"the profile has no module {network.name}, only {sorted(known)}; measure it, with the same models"
            )
        size = asdict(network.size)
        different = [f"{k} {measured.size.get(k)}, not {v}" for k, v in size.items() if measured.size.get(k) != v]
        if different:
            raise ProfileError(
                f"module {network.name} of the profile is another model ({', '.join(different)}); measure this one"
            )
        costs = {m.tp: m.cost for m in measured.degrees}
        for tp in (1, 2, 4, 8):
            found = costs.get(tp) or _scaled(network, tp, costs, cluster)
            table[network.name, tp] = with_reductions(network, tp, cluster, _as_trained(network, found))
    return table


def _scaled(network: Network, tp: int, costs: Mapping[int, Cost], cluster: Cluster) -> Cost:
    """The cost at a degree that was not measured, from the nearest one that was."""
    near = min(costs, key=lambda other: (abs(other.bit_length() - tp.bit_length()), other))
    ours, theirs = (computed_cost(network, degree, cluster.peak_flops_ns).linear_ps for degree in (tp, near))
    ratio = ours / theirs
    found = costs[near]
    return found.model_copy(
        update={"linear_ps": round(found.linear_ps * ratio), "quadratic_fs": round(found.quadratic_fs * ratio)}
    )


def _as_trained(network: Network, cost: Cost) -> Cost:
    """The cost of a module that may be frozen: of its backward as many parts as it runs."""
    percent = round(cost.backward_percent * network.gradient_passes / 2)
    return cost.model_copy(update={"backward_percent": percent})


def size_of(size: ModelSize) -> dict[str, Any]:
    """A size as a profile holds it."""
    return asdict(size)
