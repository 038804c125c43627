"""Images arranged within the waves of a backbone."""

from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.plan.arranging import arrange_and_route, images_beside, spread_images
from dataserver.planning.plan.plan import Arrangement, Routing
from dataserver.planning.stream.samples import StepSamples


def arranged_module(
    spec: JobSpec, module: ModuleSpec, samples: StepSamples, backbone: Arrangement, components: int
) -> tuple[Arrangement, Routing]:
    """An encoder or generator, its images spread within components of ranks, and the routing to the backbone."""
    found = images_beside(spec, module, samples, backbone)
    sizes, dp = samples.patches[found.image], spec.execution.backbone.dp
    rank = spread_images(module, sizes, found.rank, found.microbatch, dp, components)
    return arrange_and_route(module, backbone, found, rank, found.microbatch)
