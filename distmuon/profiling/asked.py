"""What a run is asked for: settings that go to its ranks as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True)
class Asked:
    """Settings of a run; a subclass has the fields."""

    def to_json(self) -> str:
        """As one line of JSON, for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def _refuse_less(self, least: Mapping[str, float]) -> None:
        """Refuse a field that is less than it must be.

        Raises:
            ValueError: naming it, the least it may be, and what it is.
        """
        for name, limit in least.items():
            if not getattr(self, name) >= limit:
                raise ValueError(f"{name} must be {limit} or more, not {getattr(self, name)}")
