"""The rows that `validate` encodes, and what their lengths say about all rows of a file.

They are the longest rows of each source by text, the first rows of each set of roles, and a random
sample of the others, from which shares are estimated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import numpy as np

from nemo_like.config.schema import PolicyConfig
from nemo_like.data.known_rows import MESSAGE_COLUMNS
from nemo_like.data.row_files import Row
from nemo_like.data.rows import MAX_LISTED, Rows
from nemo_like.integer_math import ceil_div

NUM_SAMPLES = 3
"""Rows that are shown decoded."""
_NUM_LONGEST = 512
_NUM_RANDOM = 256
_MIN_PER_SOURCE = 64
_MAX_ROLE_SETS = 64
_NUM_BINS = 8
_BAR_CHARACTERS = 40


def sampled_rows(rows: Rows) -> list[int]:
    """Return the indices of the rows to encode, ascending in each source."""
    chosen: list[int] = []
    for indices in rows.sources.values():
        chosen += _chosen_rows(rows, indices, len(rows.sources))
    return chosen


def _chosen_rows(rows: Rows, indices: range, num_sources: int) -> list[int]:
    """Return the indices of the rows of one source to encode, ascending."""
    sizes = []
    # An unknown role may be in a single row.
    by_roles: dict[frozenset[str], list[int]] = {}
    for index in indices:
        row = rows[index]
        # The number of characters is cheap, and close to proportional to the number of tokens.
        sizes.append(len(str(row)))
        roles = _roles(row)
        same = by_roles.get(roles, [])
        if len(same) < MAX_LISTED and (same or len(by_roles) < _MAX_ROLE_SETS):
            by_roles[roles] = [*same, index]
    first_of_roles = [index for same in by_roles.values() for index in same]
    num_longest = max(_NUM_LONGEST // num_sources, _MIN_PER_SOURCE)
    by_size = sorted(indices, key=lambda index: -sizes[index - indices.start])
    others = _random_rows(indices, num_sources)
    return sorted({*by_size[:num_longest], *others, *first_of_roles, *indices[:NUM_SAMPLES]})


def _random_rows(indices: range, num_sources: int) -> list[int]:
    """Return the indices of a random sample of one source, the same in every call."""
    num_random = max(_NUM_RANDOM // num_sources, _MIN_PER_SOURCE)
    return random.Random(0).sample(indices, min(len(indices), num_random))


def _roles(row: Row) -> frozenset[str]:
    """Return the roles of all messages of a row."""
    columns = (row.get(name) for name in MESSAGE_COLUMNS)
    lists = (column for column in columns if isinstance(column, list))
    return frozenset(message["role"] for messages in lists for message in messages)


def length_lines(
    rows: Rows,
    lengths: Mapping[int, int],
    policy: PolicyConfig,
    num_trained: Mapping[int, int] | None = None,
) -> Iterator[str]:
    """Yield a histogram of the tokens per row, and shares of all rows, of an encoded sample.

    `lengths` is row index -> tokens, and `num_trained` row index -> tokens with loss.
    """
    weights: dict[int, float] = {}
    for indices in rows.sources.values():
        drawn = [row for row in _random_rows(indices, len(rows.sources)) if row in lengths]
        weights |= dict.fromkeys(drawn, len(indices) / max(len(drawn), 1))
    if len(lengths) == len(rows):
        weights = dict.fromkeys(lengths, 1.0)
    if not weights:
        return
    sizes = np.array([lengths[row] for row in weights], dtype=np.int64)
    shares = np.array(list(weights.values())) / sum(weights.values())
    ascending = np.argsort(sizes)
    reached = np.cumsum(shares[ascending])
    half, most = (sizes[ascending][np.searchsorted(reached, share - 1e-9)] for share in (0.5, 0.95))
    text = f"mean {sizes @ shares:,.0f} tokens, median {half:,}, 95% up to {most:,}"
    if num_trained is not None:
        trained = np.array([num_trained[row] for row in weights])
        text += f"; {(trained @ shares) / max(sizes @ shares, 1):.1%} of the tokens are trained"
    if len(weights) < len(rows):
        text += f" (estimated from {len(weights)} rows drawn at random)"
    yield text
    limit = policy.max_total_sequence_length
    yield (
        f"above policy.max_total_sequence_length {limit:,}: {shares[sizes > limit].sum():.1%} of"
        f" the rows (policy.oversize_rows {policy.oversize_rows})"
    )
    first = int(sizes.min())
    width = ceil_div(int(sizes.max()) - first + 1, _NUM_BINS)
    for number, share in enumerate(np.bincount((sizes - first) // width, weights=shares)):
        start = first + number * width
        bar = "#" * round(_BAR_CHARACTERS * share)
        yield f"{start:>7,} to {start + width - 1:>7,} {share:>6.1%} {bar}".rstrip()
