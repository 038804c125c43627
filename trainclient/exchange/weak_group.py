"""A weak reference to a process group, so that its maker may destroy it."""

import weakref

from torch.distributed import ProcessGroup


class WeakGroup:
    """Refers to a process group, and leaves its life to `torch.distributed`.

    `destroy_process_group` ends the threads of gloo only where nobody else has the group. Such a thread takes the
    interpreter's lock as it lets go of tensors; if the interpreter ends meanwhile, the process ends in SIGABRT.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Refer to a group that its maker has, as `torch.distributed` has those it made."""
        self._found = weakref.ref(group)

    def __call__(self) -> ProcessGroup:
        """The group; RuntimeError where it was destroyed, and nobody else has it."""
        group = self._found()
        if group is None:
            raise RuntimeError("the process group was destroyed; rows move, also back in backward, only before that")
        return group
