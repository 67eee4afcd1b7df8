"""Tokens that any machine has: the bytes of the Python standard library's own sources.

The top-level modules of the standard library, in the order of their names, one after the other. Another Python version
has other bytes, so runs keep the digest.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

#: Tokens between the starts of two sequences. A prime of a few files' length, so that neighbours differ in kind and the
#: sequences of a long run hardly overlap.
STRIDE = 100_003


@dataclass(frozen=True)
class Text:
    """A text as token ids.

    Attributes:
        tokens: (length,) uint8, a token a byte.
        digest: SHA-256 of the bytes, in hex.
        source: where they come from, for people.
    """

    tokens: Tensor
    digest: str
    source: str

    def batch(self, step: int, sequences: range, global_sequences: int, length: int) -> tuple[Tensor, Tensor]:
        """Some sequences of a step's global batch, and what comes next at each place of them.

        Args:
            step: number of the step, from 0.
            sequences: which of the global batch's sequences.
            global_sequences: how many the global batch has; what a sequence holds depends on its place in it alone.
            length: tokens of a sequence.

        Returns:
            Inputs and targets, each (len(sequences), length) int64.

        Raises:
            ValueError: the text is too short for a sequence.
        """
        starts = self.tokens.numel() - length
        if length < 1 or starts < 1:
            raise ValueError(f"a sequence has 1 to {self.tokens.numel() - 1} tokens of {self.source}, not {length}")
        at = [(step * global_sequences + sequence) * STRIDE % starts for sequence in sequences]
        windows = torch.stack([self.tokens[start : start + length + 1] for start in at]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@functools.cache
def standard_library() -> Text:
    """The standard library of the running Python.

    Raises:
        FileNotFoundError: this Python came without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    # Asking for names that belong to the library leaves out what a machine has added beside it (sitecustomize, say).
    paths = sorted(path for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names)
    content = b"".join(path.read_bytes() for path in paths)
    if not content:
        raise FileNotFoundError(f"no sources of the Python standard library in {folder}: they are the training text")
    version = ".".join(map(str, sys.version_info[:3]))
    return Text(
        tokens=torch.frombuffer(bytearray(content), dtype=torch.uint8),
        digest=hashlib.sha256(content).hexdigest(),
        source=f"Python {version} standard library, {len(paths)} modules, {len(content):,} bytes",
    )
