"""Profiled costs for the solver, from the file that `trainclient profile` writes (`planning.costs.profile`)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from dataserver.job_files import read_values
from dataserver.outputs import write_output
from dataserver.planning.costs.profile import Profile, ProfileError, parse_profile, with_gradients
from dataserver.planning.job.fields import Cost
from trainclient.orchestrate.cluster import BOARDS, Cluster
from trainclient.orchestrate.costs import DEGREES, CostTable, computed_cost, with_reductions
from trainclient.orchestrate.networks import Network


def read_profile(path: Path) -> Profile:
    """A profile from its file.

    Raises:
        ProfileError: it cannot be read, or is no profile.
    """
    return parse_profile(read_values("the profile", path, ProfileError), str(path))


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as YAML; OutputError where it cannot be written."""
    write_output("--output", path, yaml.safe_dump(profile.model_dump(mode="json", exclude_none=True), sort_keys=False))


def costs_of(profile: Profile, networks: Sequence[Network], cluster: Cluster) -> CostTable:
    """Costs by module and degree, with tensor-parallel sums, which follow from the cluster's bandwidth.

    A degree that was not profiled has the cost of degree 1 in the ratio that operations and widths have.

    Raises:
        ProfileError: it is of another kind of GPU, or of other models; says which.
    """
    if profile.gpu != cluster.gpu:
        known_kind = f", set --gpu {profile.gpu}" if profile.gpu in BOARDS else ""
        raise ProfileError(
            f"the profile is of {profile.gpu} ({profile.device}), and the cluster has {cluster.gpu}; profile the "
            f"model there with `trainclient profile`{known_kind}, or leave --profile out"
        )
    known = {m.name: m for m in profile.modules}
    table: dict[tuple[str, int], Cost] = {}
    for network in networks:
        measured = known.get(network.name)
        if measured is None:
            raise ProfileError(
                f"the profile has no module {network.name}, only {sorted(known)}; profile it, with the same models"
            )
        theirs = asdict(measured.size)
        different = [f"{k} {theirs[k]}, not {v}" for k, v in asdict(network.size).items() if theirs[k] != v]
        if different:
            raise ProfileError(
                f"module {network.name} of the profile is another model ({', '.join(different)}); profile this one"
            )
        costs = {m.tp: m.cost for m in measured.degrees}
        for tp in DEGREES:
            found = with_gradients(costs.get(tp) or _scaled(network, tp, costs, cluster), network.gradient_passes)
            table[network.name, tp] = with_reductions(network, tp, cluster, found)
    return table


def _scaled(network: Network, tp: int, costs: Mapping[int, Cost], cluster: Cluster) -> Cost:
    """The cost at a degree that was not measured, from the nearest one that was."""
    near = min(costs, key=lambda other: (abs(other.bit_length() - tp.bit_length()), other))
    peak, gpu, found = cluster.peak_flops_ns, cluster.gpu, costs[near]
    ours, theirs = (computed_cost(network, degree, peak, gpu) for degree in (tp, near))
    ratio = ours.linear_ps / theirs.linear_ps
    return found.model_copy(
        update={
            "microbatch_ns": round(found.microbatch_ns * ours.microbatch_ns / theirs.microbatch_ns),
            "linear_ps": round(found.linear_ps * ratio),
            "quadratic_fs": round(found.quadratic_fs * ratio),
        }
    )
