"""Contestants: one text names one way of stepping, checks itself, and says what it differs in."""

from __future__ import annotations

import pytest

from distmuon.counting.contestants import Contestant, labels, ladder, read_setting
from distmuon.counting.launches import count_launches
from distmuon.profiling.session import Settings
from distmuon.variants import VARIANTS, Variant

SWITCHES = ["packing=parameter", "packing=bucket", "elementwise=bucket", "ns_batching=shape"]


def test_a_text_is_a_variant_and_its_options() -> None:
    contestant = Contestant("baseline+packing=bucket+buckets=auto")
    assert contestant.variant == Variant("bucket", "parameter", "parameter", "parameter")
    assert contestant.options(buckets="published") == {"variant": contestant.variant, "buckets": "auto"}
    assert Contestant("fused").options(buckets="published") == {"variant": VARIANTS["fused"], "buckets": "published"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("basline", "unknown variant 'basline'; did you mean 'baseline'"),
        ("", "unknown variant ''"),
        ("baseline+paking=bucket", "unknown switch 'paking'; did you mean 'packing'"),
        ("baseline+packing=buckt", "unknown packing 'buckt'; did you mean 'bucket'"),
        ("fused+buckets=own", "unknown buckets 'own'"),
        ("fused+packing", "'packing' sets nothing: write switch=value"),
        ("fused+packing=region+packing=bucket", "sets packing twice"),
    ],
)
def test_a_mistake_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Contestant(text)
    with pytest.raises(ValueError, match=message):
        Settings(variants=("baseline", text))


def test_a_ladder_turns_one_switch_after_another_under_the_shortest_names() -> None:
    rungs = ladder("baseline", [*SWITCHES, "wire_dtype=newton_schulz", "buckets=auto"])
    assert rungs == (
        "baseline",
        "batched",
        "baseline+packing=bucket",
        "baseline+packing=bucket+elementwise=bucket",
        "fused+wire_dtype=parameter",
        "fused",
        "fused+buckets=auto",
    )
    spoken = [label.replace("\N{NO-BREAK SPACE}", " ") for label in labels(rungs)]
    assert spoken[:3] == ["baseline", "+ packing=parameter", "+ packing=bucket"]
    assert spoken[-1] == "+ buckets=auto"


def test_a_switch_that_changes_nothing_is_no_rung() -> None:
    with pytest.raises(ValueError, match="'packing=region' changes nothing of 'baseline'"):
        ladder("baseline", ["packing=region"])


def test_turning_replaces_what_the_text_set() -> None:
    contestant = Contestant("fused+buckets=auto+packing=region")
    assert contestant.turned(read_setting("packing=bucket"), read_setting("buckets=published")) == Contestant(
        "fused+buckets=published"
    )


def test_texts_are_safe_in_ranges_and_files() -> None:
    text = ladder("baseline", [*SWITCHES, "buckets=auto"])[-1]
    assert not set(text) & set("/\\ :*?\"<>|'")


def test_a_contestant_is_counted_as_its_variant() -> None:
    counted = count_launches("tiny", 2, 2, **Contestant("baseline+packing=parameter").options())
    assert counted.per_rank == count_launches("tiny", 2, 2, "batched").per_rank
