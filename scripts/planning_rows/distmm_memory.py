"""How large a batch fits memory under a barrier (DISTMM, sections 4.3 and 4.4). Exact, in any one unit of memory."""

from fractions import Fraction


def pipeline_max_microbatch(
    memory: Fraction | int, states: Fraction | int, activations: Fraction | int, num_stages: int
) -> Fraction:
    """Largest microbatch of an ordinary pipeline under a barrier: ((M - M_s / P) / (M_a / P)) / P (section 4.3).

    P microbatches wait at the barrier with all their activations.

    Args:
        memory: M, of one GPU.
        states: M_s, parameters, gradients and optimizer states of the whole model.
        activations: M_a, of the whole model for each sample.
        num_stages: P.

    Raises:
        ValueError: a number is out of its range, or the states alone fill the memory.
    """
    return _samples(memory, states, activations, num_stages) * Fraction(1, num_stages)


def distmm_max_batch(
    memory: Fraction | int, states: Fraction | int, activations: Fraction | int, num_stages: int
) -> Fraction:
    """Largest contrastive batch of DISTMM-Pipe: (M P - M_s) / (2 M_a) (section 4.4); linear in the number of stages.

    Two groups share the memory of all stages. Arguments and errors are those of `pipeline_max_microbatch`.
    """
    return _samples(memory, states, activations, num_stages) * Fraction(1, 2)


def _samples(memory: Fraction | int, states: Fraction | int, activations: Fraction | int, num_stages: int) -> Fraction:
    """Samples whose activations fit the stages together."""
    if num_stages < 1 or activations <= 0 or states < 0:
        raise ValueError(
            f"{num_stages} stages, states of {states}, activations of {activations} per sample; at least 1 stage, "
            "states of at least 0 and activations above 0 are required"
        )
    free = Fraction(memory) * num_stages - Fraction(states)
    if free <= 0:
        raise ValueError(
            f"states of {states} on {num_stages} stages fill the memory of {memory} each; use more stages or shard them"
        )
    return free * Fraction(1, Fraction(activations))
