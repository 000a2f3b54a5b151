"""Columns that grow chunk by chunk: int64 arrays, and names kept once."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MAX_NAME = 4096
"""Characters kept of a name. The longest kernel names of real traces have some thousand."""


class Names(dict[str, int]):
    """Numbers names in the order they come. ``cut`` counts the names that were longer than MAX_NAME."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.cut = 0

    def __missing__(self, name: str) -> int:
        kept = name
        if len(name) > MAX_NAME:
            self.cut += 1
            # The number tells names apart that begin alike.
            kept = f"{name[: MAX_NAME - 20]}… ({len(self.texts)})"
        number = self[name] = len(self.texts)
        self.texts.append(kept)
        return number

    def codes(self, names: Iterable[str], count: int) -> Ints:
        """Return the numbers of ``count`` names."""
        return np.fromiter(map(self.__getitem__, names), np.int64, count)


class Columns:
    """Equally long int64 columns."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._parts: dict[str, list[Ints]] = {name: [] for name in names}
        self.rows = 0

    def add(self, columns: Mapping[str, Ints]) -> None:
        """Append rows; every column must be there."""
        for name in self.names:
            self._parts[name].append(columns[name])
        self.rows += len(columns[self.names[0]])

    def finish(self) -> dict[str, Ints]:
        """Return the whole columns and let go of the parts, one column after the other."""
        done: dict[str, Ints] = {}
        for name in self.names:
            parts = self._parts.pop(name)
            done[name] = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return done
