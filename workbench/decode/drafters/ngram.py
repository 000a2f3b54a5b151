"""Prompt lookup: guess that what followed an earlier occurrence of the last few tokens follows again.

The method is prompt-lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); it costs no forward pass.
"""

import torch
from torch import Tensor

from workbench.decode.drafters.protocol import Proposal, TargetFeatures
from workbench.errors import InputError

_ROOT = 0


class NGramDrafter:
    """Copies what followed the latest earlier occurrence of the longest matching suffix of ``order`` to 1 tokens.

    A copy that reaches the end of the sequence goes on into its own output (as LZ77 does), so a repeating pattern is
    continued for the whole ``depth``; there are ``depth`` tokens or none. The index is a trie over reversed n-grams:
    noting one token and finding a match each cost ``order`` dictionary look-ups, whatever the sequence's length.
    """

    name = "ngram"

    def __init__(self, depth: int = 8, order: int = 4) -> None:
        """``depth``: tokens per proposal. ``order``: longest suffix looked up. InputError unless both are positive."""
        if depth < 1 or order < 1:
            raise InputError(f"ngram: depth={depth} and order={order} must be positive")
        self.max_draft = depth
        self._order = order
        self.reset()

    def reset(self) -> None:
        """Forget the sequence and its index."""
        self._sequence: list[int] = []
        self._device = torch.device("cpu")
        self._child: dict[tuple[int, int], int] = {}
        """(node, token) to the node of the n-gram that is one token longer to the left."""
        self._next = [0]
        """For each node, the index in the sequence of the token after the n-gram's latest occurrence."""

    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Append ``tokens`` and index the n-grams that each of them follows; ``features`` are not used."""
        self._device = tokens.device
        for token in tokens.tolist():
            self._index()
            self._sequence.append(token)

    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Return ``depth`` tokens, or none if the last token is new. Deterministic at any temperature."""
        start = self._match()
        draft: list[int] = []
        if start is not None:
            known = len(self._sequence)
            for index in range(start, start + self.max_draft):
                draft.append(self._sequence[index] if index < known else draft[index - known])
        return Proposal(torch.tensor(draft, dtype=torch.int64, device=self._device))

    def _suffix(self) -> list[int]:
        """The last ``order`` tokens, newest first."""
        return self._sequence[: -self._order - 1 : -1]

    def _index(self) -> None:
        """Note that every n-gram at the end of the sequence is about to be followed by a token."""
        node = _ROOT
        for token in self._suffix():
            node = self._child.setdefault((node, token), len(self._next))
            if node == len(self._next):
                self._next.append(0)
            self._next[node] = len(self._sequence)

    def _match(self) -> int | None:
        """Where the longest indexed suffix went on last time, or None. Shorter suffixes of an indexed one exist too."""
        node = _ROOT
        for token in self._suffix():
            deeper = self._child.get((node, token))
            if deeper is None:
                break
            node = deeper
        return None if node == _ROOT else self._next[node]
