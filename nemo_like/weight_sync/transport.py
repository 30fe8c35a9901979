"""Weights from the policy's workers to the generator's, in buckets.

The driver passes handles and never receives the bytes.
"""

from __future__ import annotations

from typing import Protocol

from nemo_like.distributed.worker_calls import call_all, submit_all
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.weight_sync.stream import Bucket

MAX_BUCKET_BYTES = 256 * 2**20
"""At most two buckets exist at a time: one is loaded while the next is gathered."""


class WeightSource(Protocol):
    """The methods of a policy worker that `push` calls on all ranks."""

    def num_weight_buckets(self, max_bytes: int) -> int:
        """Plan weight buckets of at most `max_bytes` for later calls of `weight_bucket`."""
        ...

    def weight_bucket(self, index: int) -> Bucket | None:
        """Gather bucket `index` of the current weights; rank 0 returns it, the others None."""
        ...


class WeightTarget(Protocol):
    """The methods of a generation worker that `push` calls."""

    def begin_update(self) -> None:
        """Start a weight update; completions are refused until `finish_update`."""
        ...

    def load_bucket(self, bucket: Bucket) -> None:
        """Copy the tensors of `bucket` over the model's tensors of the same names.

        Raises ValueError for a name that the model does not have, or another shape.
        """
        ...

    def finish_update(self, version: int) -> None:
        """End the update; completions have weight version `version` from now on.

        Raises ValueError if a parameter was not loaded.
        """
        ...


def push(
    policy_group: WorkerGroup,
    generator_group: WorkerGroup,
    version: int,
    *,
    max_bytes: int = MAX_BUCKET_BYTES,
) -> int:
    """Load the policy's weights into every generator as `version`; returns the number of buckets.

    Raises WorkerFailure if a worker of either group fails; the generator's weights then have no
    version.
    """
    num_buckets = max(call_all(policy_group, WeightSource.num_weight_buckets, max_bytes))
    call_all(generator_group, WeightTarget.begin_update)
    next_bucket = submit_all(policy_group, WeightSource.weight_bucket, 0)
    for index in range(num_buckets):
        bucket = next_bucket
        policy_group.wait(bucket)
        if index + 1 < num_buckets:
            # Before the load, so that gathering and loading overlap.
            next_bucket = submit_all(policy_group, WeightSource.weight_bucket, index + 1)
        # By name: the argument is the handle of rank 0's bucket and not the bucket.
        generator_group.run_all_workers(WeightTarget.load_bucket.__name__, bucket[0])
    call_all(generator_group, WeightTarget.finish_update, version)
    return num_buckets
