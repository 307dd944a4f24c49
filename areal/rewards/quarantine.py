"""The inputs that the reward pool remembers: results of recent inputs, and inputs on which workers were lost."""

from typing import Generic, TypeVar

from areal.rewards.worker import RewardFailed

# Number of inputs with counted losses of workers; far more than should ever cost a worker.
SUSPECTS = 4096

T = TypeVar("T")


class Recent(Generic[T]):
    """A cache, by key, of the `size` values that were put or read last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[bytes, T] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> T | None:
        if key in self._values:
            self._values[key] = self._values.pop(key)
        return self._values.get(key)

    def put(self, key: bytes, value: T) -> None:
        self._values.pop(key, None)
        self._values[key] = value
        if len(self._values) > self._size:
            del self._values[next(iter(self._values))]


class Quarantine:
    """Refuses inputs (by digest) on which at least `limit` workers were lost."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._losses = Recent[int](SUSPECTS)

    def __bool__(self) -> bool:
        return bool(self._losses)

    def lost(self, key: bytes) -> None:
        """Count a worker that died or timed out on this input."""
        self._losses.put(key, (self._losses.get(key) or 0) + 1)

    def check(self, key: bytes) -> None:
        """Raise RewardFailed if the input is refused."""
        if (losses := self._losses.get(key) or 0) >= self._limit:
            raise RewardFailed(f"workers died or timed out on this completion ({losses}): it is refused", "quarantined")
