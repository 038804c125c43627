"""The local part of a DTensor, and DTensors from local parts."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The local part of a tensor, in the same memory; all of it unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: DTensor, held: Tensor) -> DTensor:
    """A DTensor with the local part `held`, sharded as `part` is."""
    return DTensor.from_local(
        held, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
    )


def dealt_over(tensor: Tensor) -> frozenset[str]:
    """Dimensions of the mesh along which processes have different parts of a tensor; along all others the same."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    return frozenset(n for n, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate())
