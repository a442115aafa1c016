"""Arrays that lie where results lay before, and of which no byte may change."""

from typing import Any

import jax
import numpy as np
from fault_rig import require


class Canaries:
    """What XLA allocates after an op has been given up. First `note` what is dropped, then `sing`."""

    _bytes = np.random.default_rng(5).integers(0, 256, 2**26, np.uint8)

    def __init__(self, rng: np.random.Generator):
        self._rng = rng
        self._arrays: list[tuple[jax.Array, np.ndarray]] = []
        self.freed: list[tuple[Any, int, int]] = []
        self.bytes = 0

    def note(self, shards: list[jax.Array], in_flight: bool = False) -> None:
        """Remembers where a rank's results lie, before they are dropped; to ask would wait for them."""
        for shard in shards:
            if shard.nbytes:
                (device,) = shard.devices()
                address = 0 if in_flight else shard.unsafe_buffer_pointer()
                self.freed.append((device, address, shard.nbytes))

    def sing(self, temporary_bytes: int = 0) -> "Canaries":
        """Fills what was freed: for each array two of its size, and the temporary memory of the program."""
        extra = [(device, 0, temporary_bytes) for device in {device for device, _, _ in self.freed}]
        for device, _, size in [*self.freed, *self.freed, *extra]:
            self._place(device, size)
        for array, _ in self._arrays:
            array.block_until_ready()
        return self

    def _place(self, device: Any, size: int) -> None:
        for begin in range(0, size, len(self._bytes) // 2):
            piece = min(size - begin, len(self._bytes) // 2)
            offset = int(self._rng.integers(len(self._bytes) - piece))
            content = self._bytes[offset : offset + piece]
            self._arrays.append((jax.device_put(content, device), content))
            self.bytes += piece

    def reused(self) -> float:
        """The share of what was freed that the canaries lie in."""
        covered = np.zeros(0, np.int64)
        for device, begin, size in self.freed:
            inside = 0
            for array, _ in self._arrays:
                if array.devices() == {device}:
                    at = array.unsafe_buffer_pointer()
                    inside += max(0, min(begin + size, at + array.nbytes) - max(begin, at))
            covered = np.append(covered, inside)
        return float(covered.sum() / max(1, sum(size for _, _, size in self.freed)))

    def require_unchanged(self) -> None:
        for array, content in self._arrays:
            found = np.asarray(array)
            wrong = np.flatnonzero(found != content)
            require(
                len(wrong) == 0,
                f"{len(wrong)} of {len(found)} bytes of a canary on {array.devices()} were overwritten, from "
                f"byte {wrong[0] if len(wrong) else 0} on",
            )
        self._arrays.clear()
