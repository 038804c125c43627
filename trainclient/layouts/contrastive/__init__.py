"""Towers side by side on devices of their own, whose features meet in contrastive batches (DISTMM, NSDI 2024).

The loss of a contrastive batch couples all its samples, so it is a barrier: no sample moves to another batch, and no
backward starts before all forwards of the batch are done, on all ranks of all towers.
"""
