"""The process groups in which exchanges run: one mesh axis' own, or groups made here, never a change to a user's mesh.

Torch looks at what is registered with a mesh: with a flattened part of it there, ``full_tensor()`` of uneven shards
over that part gathers them as if they were even.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.agreement import gather
from distmuon.planning.plan import Plan

Ranks = tuple[int, ...]
Groups = dict[Ranks, dist.ProcessGroup]

#: Made here, by their ranks, as long as the default group lives: the next optimizer on these ranks needs no others.
_MADE: WeakKeyDictionary[dist.ProcessGroup, Groups] = WeakKeyDictionary()


def find_groups(
    plan: Plan,
    parameters: Sequence[Tensor],
    process_group: dist.ProcessGroup | None,
    host: dist.ProcessGroup | None,
) -> Groups:
    """The process group of each exchange, by its ranks in order. Collective over ``host``.

    Args:
        plan: of this rank.
        parameters: in its order.
        process_group: that of plain ones.
        host: of all ranks, on the CPU; None if this rank is alone.
    """
    found: Groups = {}
    made = {} if host is None else _MADE.setdefault(_world(), {})
    missing: set[Ranks] = set()
    for spec, parameter in zip(plan.parameters, parameters, strict=True):
        axes = plan.options.exchange_axes(spec)
        if not axes or spec.storage is None:
            continue
        ranks = tuple(sorted(spec.storage.group(plan.rank, axes)))
        if ranks in found:
            continue
        if not isinstance(parameter, DTensor):
            assert process_group is not None
            found[ranks] = process_group
        elif len(axes) == 1:
            found[ranks] = parameter.device_mesh.get_group(axes[0])
        elif len(ranks) == dist.get_world_size():
            found[ranks] = _world()
        elif ranks in made:
            found[ranks] = made[ranks]
        else:
            missing.add(ranks)
    if host is not None:
        # All ranks make all groups in one order, also those of others, as torch and its backends ask for.
        everyone = gather("says which process groups are missing", sorted(missing), host)
        for ranks in sorted({ranks for theirs in everyone for ranks in theirs}):
            group = dist.new_group(list(ranks), group_desc="distmuon")
            if ranks in missing:
                found[ranks] = made[ranks] = group
    return found


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
