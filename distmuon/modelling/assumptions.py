"""Assumptions: what a machine does in a second."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from distmuon.checks import check_number, check_whole


@dataclass(frozen=True)
class Assumptions:
    """A machine, as the model sees it. The defaults are those of an NVIDIA DGX H100.

    From its data sheets: memory 3.35 TB/s; NVLink 900 GB/s in both directions, so 450 GB/s each way; an InfiniBand port
    of 400 Gb/s a GPU, so 50 GB/s; 8 GPUs a host. These are peaks. 400 TFLOP/s are 40 % of the peak of dense bf16
    products (989), and what :mod:`distmuon.planning.sharing` decides with. 5 us a launch and 2 us a message are round
    numbers of no data sheet.

    Attributes:
        gemm_flops: FLOP/s of matrix products, a rank.
        memory_bandwidth: bytes/s that elementwise work and copies read and write, a rank.
        launch_us: microseconds that each launch takes beside its work.
        near_bandwidth: bytes/s between ranks of one host, each way, a rank.
        far_bandwidth: bytes/s between hosts, each way, a rank.
        message_us: microseconds that each message of an exchange takes beside its bytes.
        ranks_a_host: ranks are numbered host by host.

    Raises:
        ValueError: a rate is not positive, or a cost negative, or one not finite.
        TypeError: one is no number.
    """

    gemm_flops: float = 400e12
    memory_bandwidth: float = 3.35e12
    launch_us: float = 5.0
    near_bandwidth: float = 450e9
    far_bandwidth: float = 50e9
    message_us: float = 2.0
    ranks_a_host: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                check_whole(f"assumption {field.name}", value, 1)
            else:
                check_number(f"assumption {field.name}", value, positive=not field.name.endswith("_us"))

    def to_dict(self) -> dict[str, float]:
        """By name, for reports."""
        return asdict(self)
