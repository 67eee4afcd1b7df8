"""Studies: what each notebook asks of counts, traces and profiles, as tables, figures and sentences computed from them.

``tour`` and ``whereabouts`` are of the tour, ``profile_*`` of a profile, ``ablation`` of single switches, ``scale*`` of
jobs of any size (``modelcheck`` holds their model against a measured step), ``comparison_*`` of two traces, for which
``example`` takes some where none are named, ``training_*`` of a training. Tables are DataFrames with units in their
column names; figures are functions from a DataFrame to a Figure.
"""
