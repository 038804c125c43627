"""From a place in the topology to the role that runs there."""

from typing import Any

import torch
from torch import nn

from dataserver.planning.job import JobSpec
from trainclient.models.backbone import BackboneStage
from trainclient.models.encoder import ImageEncoder
from trainclient.models.generator import ImageGenerator
from trainclient.parallel.backbone_role import BackboneRole
from trainclient.parallel.broker import Link
from trainclient.parallel.encoder_role import EncoderRole
from trainclient.parallel.executor import StepExecutor
from trainclient.parallel.generator_role import GeneratorRole, NoiseKey
from trainclient.parallel.groups import Groups
from trainclient.parallel.roles import Edge, LossWeights, Role
from trainclient.parallel.topology import Topology, TopologyError


def build_role(spec: JobSpec, topology: Topology, groups: Groups, module: nn.Module, weights: LossWeights) -> Role[Any]:
    """The role of this process around its module.

    Raises:
        LayoutError: a job with an encoder or generator but without the backbone it belongs to.
    """
    place, device = groups.place, groups.device
    dtype = next(module.parameters()).dtype
    before = _edge(topology, groups, -1, dtype)
    after = _edge(topology, groups, +1, dtype)
    name = place.module.name
    if isinstance(module, BackboneStage):
        return BackboneRole(name, module, device, before, after, weights.text)
    if isinstance(module, ImageEncoder) and after is not None:
        return EncoderRole(name, module, device, after)
    if isinstance(module, ImageGenerator) and before is not None:
        key = NoiseKey.of(spec.stream.seed, [d.name for d in spec.stream.datasets])
        return GeneratorRole(name, module, device, before, key, weights.image)
    raise TopologyError(f"{place} has no backbone beside it in the pipeline; add one to the job's modules")


def build_executor(spec: JobSpec, topology: Topology, groups: Groups, role: Role[Any]) -> StepExecutor:
    """The executor of this process's stage of the joined pipeline."""
    stage = topology.pipeline_stage(groups.place)
    before = topology.pipeline[stage - 1] if stage else None
    return StepExecutor(spec.execution, role, topology.pipeline[stage], before)


def _edge(topology: Topology, groups: Groups, direction: int, dtype: torch.dtype) -> Edge | None:
    place = groups.place
    peers = topology.sources(place) if direction < 0 else topology.targets(place)
    if not peers:
        return None
    return Edge(
        module=topology.places[peers[0]].module.name,
        forward=Link(groups.forward, peers, dtype),
        backward=Link(groups.backward, peers, dtype),
    )
