"""Profiling: real ranks, started and watched, and what is measured on them.

``run`` profiles a workload: ``launch`` starts the ranks, ``session`` is what each does, ``events`` and ``results`` what
they leave. ``training`` and ``training_ranks`` do the same for a whole training. In one process: ``host`` times the
host's side of a step, ``sweep`` copies; ``orthogonality`` measures the error of Newton-Schulz, ``device_check`` holds a
GPU against the counts. ``noise`` says whether a change is one.
"""
