"""What a step would take on a machine that is not here: from a plan's work and bytes, by stated assumptions.

``assumptions`` says what a machine does in a second, ``loads`` what each rank of a job has to do, ``pipeline`` replays
the step. Pure arithmetic on numpy arrays over the ranks; nothing is run.
"""

from distmuon.modelling.assumptions import Assumptions
from distmuon.modelling.pipeline import Replay, replay

__all__ = ["Assumptions", "Replay", "replay"]
