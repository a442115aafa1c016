"""What a group says of itself."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """What a group runs on and takes.

    Attributes:
      implementation: "ffi" or "xla", what `implementation=None` means to its ops.
      reason: why that is not "ffi", or why rows between hosts of GPUs do not go by "nccl"; empty if they do.
      device_bytes: bytes that the group takes on each device, of the memory that JAX has there.
      ranks_per_node: ranks that share a host. If there are fewer of them than the group has, rows make two
        hops: between hosts, and within one by the implementation.
      between_hosts: what brings rows from host to host: "nccl", a kernel over NCCL's device API (GIN), or
        "xla", its collectives; None if the ranks share one host.
    """

    implementation: Literal["ffi", "xla"]
    reason: str
    device_bytes: int
    ranks_per_node: int
    between_hosts: Literal["nccl", "xla"] | None
