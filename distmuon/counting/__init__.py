"""Counting: what a step launches on a GPU, from the operators that it dispatches, with no GPU and nothing running.

``rules`` says what each operator launches, ``counter`` watches operators and applies them, ``launches`` counts a step
of a workload on every rank; ``standin`` lets one process stand for a rank, ``dryrun`` steps a bare plan stage by stage;
``contestants`` names the ways of stepping that are counted and measured side by side.
"""
