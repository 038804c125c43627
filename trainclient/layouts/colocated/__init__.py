"""Every rank runs every module, one phase after the other, each arranged for itself (OrchMLLM, arXiv 2503.23830).

Since a module's phase runs alone over the whole step, waves do not apply (law 7): every phase has a balanced
arrangement of its own, and rows go from one arrangement to the next in one hop.
"""
