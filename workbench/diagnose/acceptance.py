"""Acceptance in detail: by draft position, by prompt, by context length and by batch, each with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from workbench.diagnose.host_use import own_ns
from workbench.diagnose.prompt_jackknife import Interval, positive, share
from workbench.diagnose.steps import Ints, RunPass
from workbench.trace.bundle import Bundle

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

CONTEXT_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Where the groups of ``by_context`` begin, in tokens."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The steps that say what they drafted and accepted, in order, warm-up left out, one array entry each.

    ``prompt`` indexes ``prompts``. Counts in tokens; ``context`` and ``batch`` are -1 where not recorded.
    ``draft_ns`` and ``wall_ns`` are the drafting phase and the whole step, the latter without waits for a CPU that
    other work had.
    """

    prompts: tuple[str, ...]
    step_id: Ints
    sequence: Ints
    prompt: Ints
    context: Ints
    batch: Ints
    drafted: Ints
    accepted: Ints
    committed: Ints
    draft_ns: Ints
    wall_ns: Ints

    def __len__(self) -> int:
        return len(self.step_id)

    @property
    def depth(self) -> int:
        """The deepest draft."""
        return int(self.drafted.max(initial=0))

    def where(self, mask: Flags) -> "Drafts":
        """Return the steps of ``mask``."""
        names = [name for name in self.__dataclass_fields__ if name != "prompts"]
        return Drafts(self.prompts, *(getattr(self, name)[mask] for name in names))

    def sums(self, values: Ints | Flags) -> Floats:
        """Return ``values`` summed by prompt, [prompts]."""
        return np.bincount(self.prompt, weights=values, minlength=len(self.prompts)).astype(np.float64)


_SQL = """
SELECT coalesce(prompt_id, 'sequence ' || coalesce(sequence_id, -1)) AS prompt, step_id,
       coalesce(sequence_id, -1) AS sequence_id, coalesce(context, -1) AS context, coalesce(batch, -1) AS batch,
       drafted, accepted, coalesce(committed, accepted + 1) AS committed,
       draft_end_ns - start_ns AS draft_ns, {own} AS wall_ns
FROM steps LEFT JOIN (SELECT sequence_id, prompt_id FROM sequences) USING (sequence_id)
WHERE variant = ? AND run_pass = ? AND NOT warmup AND drafted IS NOT NULL AND accepted IS NOT NULL
ORDER BY start_ns, step_id
"""


def load_drafts(bundle: Bundle, variant: str, run_pass: RunPass = "clean") -> Drafts:  # noqa: S107
    """Read what ``variant`` drafted and accepted in one pass."""
    table = bundle.query(_SQL.format(own=own_ns(bundle)), [variant, run_pass])
    columns = {
        name: table.column(name).to_numpy(zero_copy_only=False).astype(np.int64) for name in table.column_names[1:]
    }
    names = table.column("prompt").to_pylist()
    prompts = tuple(sorted(set(names)))
    index = {name: number for number, name in enumerate(prompts)}
    return Drafts(
        prompts,
        columns["step_id"],
        columns["sequence_id"],
        np.array([index[name] for name in names], np.int64),
        *(columns[name] for name in table.column_names[3:]),
    )


@dataclass(frozen=True, slots=True)
class PositionRate:
    """One draft position, from 1.

    ``survival``: share of the drafts this deep whose tokens up to and including this one were accepted, of
    ``reached`` steps. ``kept``: share of those that were put to the test here, because all before was accepted
    (``tried`` steps), that passed it.
    """

    position: int
    reached: int
    tried: int
    survival: Interval
    kept: Interval


def position_rates(drafts: Drafts) -> tuple[PositionRate, ...]:
    """Return the rates of every position; steps that drafted less do not count against later positions."""
    rates = []
    for position in range(1, drafts.depth + 1):
        deep = drafts.drafted >= position
        tested = deep & (drafts.accepted >= position - 1)
        passed = deep & (drafts.accepted >= position)
        rates.append(
            PositionRate(
                position,
                int(deep.sum()),
                int(tested.sum()),
                share(drafts.sums(passed), drafts.sums(deep)),
                share(drafts.sums(passed), drafts.sums(tested)),
            )
        )
    return tuple(rates)


@dataclass(frozen=True, slots=True)
class GroupLength:
    """The accept length, bonus token included, of one group of steps: a prompt, a range of contexts, a batch size.

    ``first``: position 1's acceptance in the group, which does not depend on how deep it drafted.
    """

    name: str
    steps: int
    accept_length: Interval
    first: Interval


def by_prompt(drafts: Drafts) -> tuple[GroupLength, ...]:
    """Return the accept length of every prompt, shortest first; a single prompt has no interval."""
    groups = [_group(name, drafts.where(drafts.prompt == index)) for index, name in enumerate(drafts.prompts)]
    return tuple(sorted(groups, key=lambda group: (group.accept_length.value, group.name)))


def by_context(drafts: Drafts, edges: Sequence[int] = CONTEXT_EDGES) -> tuple[GroupLength, ...]:
    """Return the accept length by tokens in the KV cache, short contexts first; groups without steps are left out."""
    group = np.searchsorted(np.array(edges), drafts.context, side="right")
    names = [f"< {edges[0]}", *(f"{low} to {high - 1}" for low, high in pairwise(edges))]
    names.append(f"≥ {edges[-1]}")
    known = drafts.context >= 0
    masks = [known & (group == index) for index in range(len(names))]
    return tuple(_group(name, drafts.where(mask)) for name, mask in zip(names, masks, strict=True) if mask.any())


def by_batch(drafts: Drafts) -> tuple[GroupLength, ...]:
    """Return the accept length by the number of sequences decoded together; steps that do not say it are left out."""
    sizes = sorted(set(drafts.batch[drafts.batch > 0].tolist()))
    return tuple(_group(f"batch {size}", drafts.where(drafts.batch == size)) for size in sizes)


def length_ratio(drafts: Drafts, reference: Drafts) -> tuple[Interval, int]:
    """Return the accept length over the reference's on the prompts of both, and how many those are.

    The interval is a jackknife over prompts, paired, so prompts that are hard for both cancel.
    """
    names = sorted(set(drafts.prompts) & set(reference.prompts))
    own, other = (
        dict(zip(side.prompts, np.stack(_tokens_and_steps(side), 1), strict=True)) for side in (drafts, reference)
    )
    own_sums, other_sums = (np.array([side[name] for name in names]).reshape(-1, 2) for side in (own, other))

    def ratio(mask: Flags) -> float:
        mine, theirs = own_sums[mask].sum(0), other_sums[mask].sum(0)
        if not mine[1] or not theirs[0]:
            return 0.0
        return float(mine[0] / mine[1] / (theirs[0] / theirs[1]))

    return (positive(ratio, len(names)) if names else Interval(0.0)), len(names)


def _tokens_and_steps(drafts: Drafts) -> tuple[Floats, Floats]:
    return drafts.sums(drafts.committed), drafts.sums(np.ones(len(drafts), np.int64))


def _group(name: str, drafts: Drafts) -> GroupLength:
    tokens, steps = _tokens_and_steps(drafts)
    there = steps > 0
    tokens, steps = tokens[there], steps[there]
    length = positive(lambda mask: float(tokens[mask].sum() / max(steps[mask].sum(), 1)), len(steps))
    deep = drafts.drafted >= 1
    return GroupLength(name, len(drafts), length, share(drafts.sums(deep & (drafts.accepted >= 1)), drafts.sums(deep)))
