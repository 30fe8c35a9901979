"""Log-probs, or targets of teachers, that stay on the rank that computed them, and the handles that
a driver has instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from nemo_like.data.jagged import Jagged

if TYPE_CHECKING:
    from nemo_like.policy.heads.targets import Targets

LogprobName = Literal["prev_logprobs", "reference_logprobs"]


@dataclass(frozen=True, slots=True)
class LogprobHandle:
    """Names the results of one pass of `compute_logprobs` or `compute_targets`, which the workers
    keep.

    Its size does not depend on the number of tokens. It is equal on all ranks, since every rank
    takes part in every pass.
    """

    pass_index: int
    """Passes that the workers had started before this one."""
    names: tuple[LogprobName, ...]
    has_targets: bool = False
    """The pass was one of teachers; it has no log-probs then."""


class LogprobStore:
    """Keeps the log-probs of the latest pass on one rank; earlier passes are released.

    They are jagged float32 arrays in host memory, in the row order of the shard: 4 bytes per token
    and column, as much as `input_ids` of the shard. They are therefore independent of the
    microbatches they were computed in, an offload of the model does not move them, and every
    context-parallel rank has full rows, of which `model_inputs.build_inputs` takes its share.
    Pipeline stages but the last keep nothing: they compute no loss.
    """

    def __init__(self) -> None:
        self._num_passes = 0
        self._columns: dict[str, Jagged] = {}
        self._targets: Targets | None = None

    def start_pass(self) -> None:
        """Release the columns of the previous pass; its handle becomes invalid."""
        # Before the new columns are computed, so that two passes are never in memory together.
        self._columns = {}
        self._targets = None
        self._num_passes += 1

    def keep(self, columns: Mapping[str, Jagged], names: tuple[LogprobName, ...]) -> LogprobHandle:
        """Keep the columns of the pass that `start_pass` began; they replace the previous ones.

        `names` are the names of the pass; `columns`, float32 [T] in shard order, is empty on all
        pipeline stages but the last.
        """
        self._columns = dict(columns)
        return LogprobHandle(self._num_passes - 1, names)

    def keep_targets(self, targets: Targets) -> LogprobHandle:
        """Keep the targets of the pass that `start_pass` began."""
        self._targets = targets
        return LogprobHandle(self._num_passes - 1, (), has_targets=True)

    def release_targets(self) -> None:
        """Release the targets, which have tensors on the device."""
        self._targets = None

    def targets(self, handle: LogprobHandle | None) -> Targets | None:
        """Return the targets of `handle`, of which `columns` checks the pass; None without any.

        Raises ValueError if they were released.
        """
        if handle is None or not handle.has_targets:
            return None
        if self._targets is None:
            raise ValueError(
                f"the targets of pass {handle.pass_index} were released when the model was"
                " offloaded; call compute_targets and train while it stays on the device"
            )
        return self._targets

    def columns(self, handle: LogprobHandle, input_ids: Jagged) -> dict[str, Jagged]:
        """Return the columns of `handle`, float32 [T], for the shard with `input_ids` [T].

        Raises ValueError if the columns were released, or belong to rows of other lengths.
        """
        latest = self._num_passes - 1
        # The values of an older pass are gone, and the latest values belong to other rows.
        if handle.pass_index != latest:
            kept = "none" if latest < 0 else f"pass {latest}"
            raise ValueError(
                f"the log-probs of pass {handle.pass_index} were released: a worker keeps only"
                f" its latest pass, here {kept}; call compute_logprobs for this batch again,"
                " with all names that train needs in one call"
            )
        for name, column in self._columns.items():
            if not np.array_equal(column.offsets, input_ids.offsets):
                raise ValueError(
                    f"{name} of pass {handle.pass_index} belongs to another batch: it has"
                    f" {len(column)} rows of {column.offsets[-1]} tokens, the shard has"
                    f" {len(input_ids)} rows of {input_ids.offsets[-1]}; pass the log-probs that"
                    " compute_logprobs returned for this batch"
                )
        return dict(self._columns)
