"""What one process has of a tensor that is dealt to several: torch's DTensors, from both sides."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor that is dealt to several; it shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: DTensor, held: Tensor) -> DTensor:
    """A tensor of which `held` is what this process has, dealt as `part` is."""
    return DTensor.from_local(
        held, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
    )


def dealt_over(tensor: Tensor) -> frozenset[str]:
    """Dimensions of the mesh along which processes have different parts of a tensor; along all others the same."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    return frozenset(n for n, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate())
