"""Jobs of every layout with the samples of a step."""

from builders.colocated import colocated_steps
from builders.contrastive import contrastive_steps
from builders.grouped import grouped_steps
from builders.pipelined import SCHEDULES, steps, tight_steps
from hypothesis import strategies as st

STEPS = {
    "pipelined": st.one_of(tight_steps(), steps(several=True, schedules=SCHEDULES)),
    "grouped": grouped_steps(),
    "colocated": colocated_steps(),
    "contrastive": contrastive_steps(),
}
"""For each kind of layout; some steps have samples that no plan holds, and `plan_step` says so."""
