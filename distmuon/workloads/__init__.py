"""Models that train with DistMuon here, and the sizes of those that are only planned.

``config`` has the sizes and the recipe, ``model`` the decoder, ``parallel`` its meshes and sharding, ``storage`` what
that comes to without a process, ``text`` the tokens, ``training`` the loop.
"""

from distmuon.workloads.config import WORKLOADS, Layout, Workload, get_workload

__all__ = ["WORKLOADS", "Layout", "Workload", "get_workload"]
