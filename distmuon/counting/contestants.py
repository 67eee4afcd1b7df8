"""Contestants: ways of stepping that are counted and measured beside one another, each named by one text.

    baseline    fused+buckets=auto    baseline+packing=bucket+elementwise=bucket

A text is a variant's name and the switches that differ from it. It stands in profiler ranges, tables and files as it
is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from distmuon.commandline import checked
from distmuon.names import choose
from distmuon.newton_schulz import NS_ALGORITHMS
from distmuon.richtext import NBSP
from distmuon.variants import SWITCHES, VARIANTS, Variant
from distmuon.workloads.storage import BUCKETS

#: What a text may set beside the switches of a variant: arguments of a step that are chosen on top of it.
OPTIONS = {"buckets": BUCKETS, "ns_algorithm": NS_ALGORITHMS}


@dataclass(frozen=True)
class Contestant:
    """One way of stepping.

    Args:
        text: a variant's name, followed by any number of ``+switch=value``.

    Raises:
        ValueError: an unknown variant, switch or value, with the nearest; or a switch that is set twice.
    """

    text: str

    def __post_init__(self) -> None:
        name, *settings = self.text.split("+")
        choose("variant", name, VARIANTS)
        seen = [read_setting(setting)[0] for setting in settings]
        for switch in seen:
            if seen.count(switch) > 1:
                raise ValueError(f"{self.text!r} sets {switch} twice: set it once")

    @property
    def variant(self) -> Variant:
        """Its variant, switches set."""
        name, settings = self._parts()
        return replace(VARIANTS[name], **{switch: value for switch, value in settings.items() if switch in SWITCHES})

    def options(self, **defaults: str) -> dict[str, Any]:
        """Arguments for what steps or counts: ``variant``, and the options set here or else in ``defaults``."""
        _, settings = self._parts()
        chosen = {option: value for option, value in settings.items() if option in OPTIONS}
        return {"variant": self.variant, **defaults, **chosen}

    def turned(self, *settings: tuple[str, str]) -> Contestant:
        """The same with each (switch, value) turned in its turn, whatever it was before, under its shortest name."""
        if not settings:
            return self
        (switch, value), *more = settings
        _, parts = self._parts()
        options = {option: chosen for option, chosen in parts.items() if option in OPTIONS}
        variant = self.variant
        if switch in OPTIONS:
            options[switch] = value
        else:
            variant = replace(variant, **{switch: value})

        def changes(base: str) -> list[str]:
            values = ((each, getattr(variant, each)) for each in SWITCHES)
            return [f"{each}={new}" for each, new in values if new != getattr(VARIANTS[base], each)]

        nearest = min(VARIANTS, key=lambda base: len(changes(base)))
        added = [f"{option}={chosen}" for option, chosen in options.items()]
        return Contestant("+".join([nearest, *changes(nearest), *added])).turned(*more)

    def changes_from(self, other: Contestant) -> str:
        """What was turned to come here from ``other``: ``"packing=bucket"``; empty for the same way of stepping."""
        mine, theirs = self._all(), other._all()
        return ", ".join(f"{switch}={value}" for switch, value in mine.items() if theirs.get(switch) != value)

    def _all(self) -> dict[str, str]:
        return {switch: getattr(self.variant, switch) for switch in SWITCHES} | self._parts()[1]

    def _parts(self) -> tuple[str, dict[str, str]]:
        name, *settings = self.text.split("+")
        return name, dict(map(read_setting, settings))


def read_setting(text: str) -> tuple[str, str]:
    """A ``switch=value`` as (switch, value).

    Raises:
        ValueError: it is none, or an unknown switch or value; the message gives the nearest.
    """
    switch, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} sets nothing: write switch=value, as in packing=bucket")
    values = SWITCHES | OPTIONS
    choose("switch", switch, values)
    return switch, choose(switch, value, values[switch])


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Give a script ``--set SWITCH=VALUE``, any number of times; ``settings`` are what :meth:`Contestant.turned`
    takes.
    """
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        type=checked(read_setting),
        metavar="SWITCH=VALUE",
        help="turn a switch of every variant given, as packing=bucket; may be given several times",
    )


def ladder(start: str, settings: Sequence[str]) -> tuple[str, ...]:
    """Contestants that turn one switch after another: ``start``, and each of ``settings`` on top of those before.

    Args:
        start: a contestant.
        settings: ``switch=value``, in turn; one may turn a switch again.

    Returns:
        Their texts, each the shortest there is: ``("baseline", "batched", "baseline+packing=bucket", ...)``.

    Raises:
        ValueError: as for :class:`Contestant`, or a setting that changes nothing.
    """
    rungs = [Contestant(start)]
    for setting in settings:
        rungs.append(rungs[-1].turned(read_setting(setting)))
        if not rungs[-1].changes_from(rungs[-2]):
            raise ValueError(f"{setting!r} changes nothing of {rungs[-2].text!r}: leave it out")
    return tuple(rung.text for rung in rungs)


def labels(texts: Sequence[str]) -> list[str]:
    """What each of a ladder's contestants adds to the one before: ``["baseline", "+ packing=bucket", ...]``."""
    steps = pairwise(map(Contestant, texts))
    return [*texts[:1], *(f"+{NBSP}{new.changes_from(old)}" for old, new in steps)]
