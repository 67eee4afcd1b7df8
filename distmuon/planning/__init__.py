"""Planning: who orthogonalises which matrix, what travels, and where it lies. Pure: no tensor, no process group.

:func:`~distmuon.planning.plan.plan_step` makes the plan of one rank, from matrices, placements, buckets and owners in
turn; :func:`~distmuon.planning.totals.step_totals` adds up all ranks.
"""
