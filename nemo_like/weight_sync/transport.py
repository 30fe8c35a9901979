"""Weights from the policy's workers to the generator's, in buckets. The driver passes handles and
never sees a byte.

The policy's workers have `num_weight_buckets(max_bytes) -> int` and `weight_bucket(index) ->
Bucket` (all take part in gathering; rank 0 returns the bucket, the others None). The generator's
have `begin_update()`, `load_bucket(bucket)` and `finish_update(version)`.
"""

from __future__ import annotations

from nemo_like.distributed.worker_group import WorkerGroup

MAX_BUCKET_BYTES = 256 * 2**20
"""At most two buckets exist at a time: one being loaded while the next is gathered."""


def push(
    policy_group: WorkerGroup,
    generator_group: WorkerGroup,
    version: int,
    *,
    max_bytes: int = MAX_BUCKET_BYTES,
) -> int:
    """Give every generator the policy's weights under the number `version`; returns how many
    buckets that took.

    Raises WorkerFailure if a worker of either group fails; the generator's weights are then of no
    version.
    """
    num_buckets = max(policy_group.run_all_workers("num_weight_buckets", max_bytes))
    generator_group.run_all_workers("begin_update")
    gathering = policy_group.submit_all("weight_bucket", 0)
    for index in range(num_buckets):
        gathered = gathering
        policy_group.wait(gathered)
        if index + 1 < num_buckets:
            gathering = policy_group.submit_all("weight_bucket", index + 1)
        generator_group.run_all_workers("load_bucket", gathered[0])
    generator_group.run_all_workers("finish_update", version)
    return num_buckets
