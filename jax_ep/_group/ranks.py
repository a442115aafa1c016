"""The ranks of a group as a traced program sees them."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_ep._group.group import Group

# Ranks of each domain, as indices along a group's axis.
IndexGroups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Ranks:
    """The static part of a group. Hashable, and equal for equal groups, whose key is the same."""

    key: str  # identifies the group in the extension
    group: "Group" = dataclasses.field(compare=False)
    """The `Group`, whose life the ranks share."""
    name: str = dataclasses.field(compare=False)  # for messages
    axis_name: str | tuple[str, ...] = dataclasses.field(compare=False)
    axes: tuple[str, ...] = dataclasses.field(compare=False)
    size: int = dataclasses.field(compare=False)
    platform: str = dataclasses.field(compare=False)
    spans_processes: bool = dataclasses.field(compare=False)
    index_groups: IndexGroups | None = dataclasses.field(default=None, compare=False)
    """Not None for the ranks of a domain: those of each domain, as indices along the axes."""
    within: "Ranks | None" = dataclasses.field(default=None, compare=False)
    """The ranks of a domain, if the group spans domains."""
    rails: str | None = dataclasses.field(default=None, compare=False)
    """The key of the rails, if rows travel between domains through NCCL's device API."""

    def __repr__(self) -> str:
        # JAX's errors about pytrees print the routing of a handle.
        return self.name

    @property
    def ranks_per_domain(self) -> int:
        """Number of ranks that share a domain."""
        return self.size if self.within is None else self.within.size

    @property
    def num_domains(self) -> int:
        """Number of domains."""
        return self.size // self.ranks_per_domain
