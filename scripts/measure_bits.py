"""Where do batched matrix products have the bits of single ones on this CPU? There Newton-Schulz may batch.

    python scripts/measure_bits.py

For each short side: of how many matrices the two products of a Newton-Schulz iteration differ between a batch and one
matrix at a time, in bf16 and fp32; and of how many batches the last product differs if it is written into a transposed
result instead of a contiguous one.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from distmuon.commandline import Parser

SIDES = (4, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 18, 20, 24, 32, 48, 64)
BATCH = 8
A, B, C = 3.4445, -4.775, 2.0315


def iteration(x: Tensor, transposed: bool = False) -> Tensor:
    """One Newton-Schulz iteration on a matrix or a batch; the result is written transposed if asked."""
    addmm, mm = (torch.baddbmm, torch.bmm) if x.ndim == 3 else (torch.addmm, torch.mm)
    gram = mm(x, x.mT)
    polynomial = addmm(gram, gram, gram, beta=B, alpha=C)
    out = torch.empty_like(x.mT, memory_format=torch.contiguous_format).mT if transposed else torch.empty_like(x)
    return addmm(x, polynomial, x, beta=A, out=out)


def differing(side: int, dtype: torch.dtype, trials: int) -> tuple[float, float]:
    """Shares of matrices that a batch changes, and of batches that a transposed result changes."""
    matrices = batches = 0
    for _ in range(trials):
        x = (torch.randn(BATCH, side, 2 * side + 1) / (2 * side) ** 0.5).to(dtype)
        together = iteration(x)
        matrices += sum(not torch.equal(together[index], iteration(x[index].clone())) for index in range(BATCH))
        batches += not torch.equal(together, iteration(x, transposed=True))
    return matrices / (trials * BATCH), batches / trials


def main() -> None:
    """Measure and print."""
    parser = Parser(__doc__)
    parser.add_argument("--trials", type=int, default=100, help=f"batches of {BATCH} a line")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lines = [
        f"{'':>10}{'batch unlike single':>24}{'transposed unlike not':>26}",
        f"{'short side':>10}" + f"{'bf16':>12}{'fp32':>12}" * 2,
    ]
    for side in SIDES:
        shares = [differing(side, dtype, arguments.trials) for dtype in (torch.bfloat16, torch.float32)]
        cells = [share[column] for column in (0, 1) for share in shares]
        lines.append(f"{side:>10}" + "".join(f"{cell:>12.2%}" for cell in cells))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
