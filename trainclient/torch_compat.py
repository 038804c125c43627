"""What older versions of torch have under another name, in another form, or not at all.

"Goes with torch 2.13" says that an entry can be removed when that is the oldest version that `pyproject.toml` admits.
What the installed torch offers decides what is done, not its version number.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import register_dataclass, tree_leaves

if TYPE_CHECKING:  # some seconds, which models need not pay
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.fsdp import FSDPModule

VarlenKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, tuple[int, int]], Tensor]
"""Query, key, value, offsets of both, longest segments of both, and how many rows before and after; -1 for all."""


def reduce_scatter(
    output: Tensor, whole: Tensor, *, group: ProcessGroup, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> dist.Work | None:
    """`dist.reduce_scatter_single`, under the name that the installed torch has for it. Goes with torch 2.13."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast(dist.Work | None, reduce(output, whole, op=op, group=group, async_op=async_op))


def reduce_unused_parameters(unit: "FSDPModule") -> None:
    """Have a sharded unit reduce zeros for parameters that a backward pass left out. Goes with torch 2.13.

    Where it has no such setting it reduces the gradients that there are, and ranks with other ones wait forever: here
    what was left out gets zeros before.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:  # a unit without parameters
        return
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        for share in group.fsdp_params if group.reduce_grads else ():
            parameter = getattr(share, "_unsharded_param", None)  # none where no pass has gathered it
            if parameter is not None and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        reduce(*unused)

    group.post_backward = post_backward  # type: ignore[method-assign]


def find_tensors_in_dataclasses(unit: nn.Module) -> None:
    """Have a sharded unit find the tensors in dataclasses that it takes and gives. Goes with torch 2.12.

    It gathers and reduces when their gradients pass. Before, it looks into pytrees alone, so dataclasses with tensors
    that want gradients are made such.
    """
    from torch.distributed.fsdp import _common_utils

    if hasattr(_common_utils, "collect_grad_tensors"):
        return
    unit.register_forward_pre_hook(lambda _, *given: _register(given), prepend=True, with_kwargs=True)
    unit.register_forward_hook(lambda _, __, output: _register(output), prepend=True)


def _register(found: Any) -> None:
    for leaf in tree_leaves(found):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
            _register(fields)
            if any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(fields)):
                register_dataclass(type(leaf))


@functools.cache
def varlen_kernel() -> VarlenKernel:
    """Flash attention of packed segments in half precision on CUDA, [T, heads, d] to [S, groups, d].

    Goes with torch 2.12.

    It takes queries, keys, values, the offsets of both sides' segments (int32 [n + 1]), the rows of their longest ones,
    and how far a row sees back and ahead (-1: as far as its segment goes). The compiler can look into what this
    returns, but not into this.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn  # brings the compiler: a second that a CPU need not pay
    except ModuleNotFoundError:  # torch 2.9
        return _aten_varlen
    return fitted_varlen(varlen_attn)


def fitted_varlen(function: Callable[..., Any]) -> VarlenKernel:
    """`varlen_attn` of any torch: with windows since 2.11, and since 2.12 with a flag for groups. Goes with torch 2.12.

    The kernel below takes groups in every version.
    """
    parameters = inspect.signature(function).parameters
    if "window_size" not in parameters:  # torch 2.10
        return _aten_varlen
    flagged = "enable_gqa" in parameters

    def run(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        *between, window = rest
        grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if flagged else {}
        return cast(Tensor, function(query, key, *between, window_size=window, **grouped))

    return run


def _aten_varlen(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
    """The kernel below `varlen_attn`. Goes with torch 2.11."""
    *between, (left, right) = rest
    outputs = torch.ops.aten._flash_attention_forward(
        query, key, *between, 0.0, right == 0, False, window_size_left=left, window_size_right=right
    )
    return cast(Tensor, outputs[0])


def shutdown_timeout(seconds: int) -> dict[str, Any]:
    """The option of `LaunchConfig` by which processes get so long to end after a signal. Goes with torch 2.12.

    Before, there is none, and they are killed after 30 s.
    """
    from torch.distributed.launcher.api import LaunchConfig

    is_known = any(field.name == "shutdown_timeout" for field in dataclasses.fields(LaunchConfig))
    return {"shutdown_timeout": seconds} if is_known else {}


class Stager:
    """A `DefaultStager` that copies any number of times; one of torch 2.11 or 2.12 does once. Goes with torch 2.13."""

    def __init__(self, options: "StagingOptions") -> None:
        """Copy as the options say."""
        self._options = options
        self._stager = _new_stager(options)

    def stage(self, tensors: Mapping[str, Tensor]) -> Any:
        """Copies of the tensors in host memory, or a future of them, as the options say."""
        copies = self._stager.stage(dict(tensors))
        if not _stagers_last():
            self._stager = _new_stager(self._options)
        return copies


def _new_stager(options: "StagingOptions") -> "DefaultStager":
    from torch.distributed.checkpoint.staging import DefaultStager

    return DefaultStager(options)


@functools.cache
def _stagers_last() -> bool:
    from torch.distributed.checkpoint.staging import StagingOptions

    stager = _new_stager(StagingOptions(False, False, False, False))
    try:
        for _ in range(2):
            stager.stage({"": torch.zeros(1)})
    except KeyError:
        return False
    return True
