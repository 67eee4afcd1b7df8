"""The settings of a parameter group, read from its dict and checked, before every step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from distmuon.checks import check_choice, check_number, check_whole
from distmuon.names import choose
from distmuon.newton_schulz import Triple, coefficients_by_step
from distmuon.planning.options import PlanOptions

ADJUST_LR_FNS = (None, "original", "match_rms_adamw")

#: What a parameter group may hold beside settings: parameters, a label, and what learning rate schedulers keep there.
GROUP_KEYS = (
    *("params", "param_names", "name", "initial_lr", "swa_lr"),
    *("max_lr", "min_lr", "base_momentum", "max_momentum"),
)


def refuse_unknown_keys(given: Iterable[str], defaults: Mapping[str, Any]) -> None:
    """Refuse a setting that a group was given and that there is not: a typing error would pass silently otherwise.

    Raises:
        ValueError: with the nearest valid name.
    """
    for key in sorted(set(given).difference(GROUP_KEYS)):
        choose("setting of a parameter group", key, defaults)


@dataclass(frozen=True)
class Settings:
    """The settings of a parameter's group; names and meaning are those of ``torch.optim.Muon``."""

    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[Triple, ...]  # of each Newton-Schulz iteration
    eps: float
    adjust_lr_fn: str | None

    def lr_ratio(self, rows: int, cols: int) -> float:
        """The learning rate of a rows x cols matrix relative to ``lr``, by the rules of ``torch.optim.Muon``."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, cols))
        return math.sqrt(max(1, rows / cols))


def group_settings(group: dict[str, Any], options: PlanOptions) -> Settings:
    """The settings of a group, as numbers but for a learning rate that must not be read.

    Raises:
        ValueError: a setting out of range, named.
        TypeError: one that is no number where one is wanted.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of {lr.numel()} elements: give one")
    if options.capturable and not isinstance(lr, Tensor):
        raise ValueError(f"capturable=True reads no number on the host: lr is {lr}, give a tensor")
    if isinstance(lr, Tensor):
        # Not read to a number: what it is multiplied with is rounded to its dtype then, as torch.optim.Muon does.
        lr = lr.view(()) if options.capturable else lr.detach().cpu().view(())
    values = {field.name: group[field.name] for field in fields(Settings)} | {"lr": lr}
    for name in ("lr", "weight_decay", "momentum", "eps"):
        value = values[name]
        if name == "lr" and isinstance(value, Tensor):
            if options.capturable:
                continue
            value = value.item()
        check_number(name, value, also=", or a tensor of one" * (name == "lr"))
    check_choice("nesterov", values["nesterov"], (True, False))
    check_choice("adjust_lr_fn", values["adjust_lr_fn"], ADJUST_LR_FNS)
    ns_steps = group["ns_steps"]
    check_whole("ns_steps", ns_steps, 1, 99)
    values["ns_coefficients"] = coefficients_by_step(values["ns_coefficients"], ns_steps, options.ns_algorithm)
    return Settings(**values)
