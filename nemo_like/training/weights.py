"""Weights of the generator: sent after each step, and compared with the policy's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from nemo_like.config.errors import counted
from nemo_like.config.schema import ClusterConfig, PolicyConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.generation.generator import Generator
from nemo_like.generation.replicas import Replica
from nemo_like.metrics import Metrics, Timers, merge_metrics
from nemo_like.policy.policy import Policy
from nemo_like.weight_sync.check import LogprobCheck, probe_rows
from nemo_like.weight_sync.sync import WeightSync

NUM_CHECKED = 10
"""The first updates of a run, all of which are checked; of the later ones every tenth is."""


class GeneratorWeights:
    """Keeps the generator's weights equal to the policy's.

    After an update both compute the log-probs of a few fixed tokens. A difference stops the run
    before it samples from the generator (`policy.generation.check_weights`). Checked are the first
    updates, every tenth later one, and the first of a replica that was started again.
    """

    def __init__(
        self,
        config: PolicyConfig,
        cluster: ClusterConfig,
        policy: Policy,
        generator: Generator,
        timers: Timers,
        report: Callable[[str], None],
    ) -> None:
        """`report` gets a line when the transport is chosen."""
        self._policy = policy
        self._generator = generator
        self.timers = timers
        self._report = report
        self._sync = WeightSync(
            policy.group,
            dtype=config.precision,
            # Half: ranks of the policy may wait in a collective for the one that sends.
            timeout_s=cluster.collective_timeout_s / 2,
        )
        self._check = LogprobCheck(config.precision)
        self._is_enabled = config.generation.check_weights
        self._is_colocated = cluster.gpus_per_node > 0 and cluster.generation_workers == 0
        self._expected: Jagged | None = None
        """The policy's log-probs of the probe rows, until the generator was compared."""
        self._unverified: list[Replica] = []
        """The replicas to compare with them."""
        self._num_updates = 0
        """Of all replicas."""
        self._checked: set[WorkerGroup] = set()
        """The processes whose weights were checked at least once."""
        self._metrics: list[Metrics] = []
        """Of updates that no call has returned yet."""
        self._max_length = config.max_total_sequence_length - 1

    def update(self, version: int, replicas: Sequence[Replica] | None = None) -> Metrics:
        """Send the policy's weights to `replicas` as `version`, and check them.

        None means every replica, and returns the metrics of this update and of updates of single
        replicas since the last such call; otherwise none are returned. A replica that fails is
        restarted. Call while the policy is on its devices. Raises WeightSyncError if a replica
        computes other log-probs than the policy; if they share devices, `verify` raises it.
        """
        is_complete = replicas is None
        if replicas is None:
            replicas = self._generator.live_replicas
        previous_transport = self._sync.transport
        report = self._sync.push([replica.group for replica in replicas], version)
        if report.transport is not None and report.transport != previous_transport:
            self._report(
                f"weights are sent to {counted(len(replicas), 'generator replica')} over"
                f" {report.transport}: {report.num_bytes / 1e6:,.0f} MB in"
                f" {counted(report.num_buckets, 'bucket')}, {report.total_s:.2f} s"
            )
        updated = []
        for position, replica in enumerate(replicas):
            failure = report.failed.get(position)
            if failure is None:
                updated.append(replica)
            else:
                self._generator.replace(replica, failure)
        self._generator.set_version(updated, version)
        self._metrics.append(report.metrics())
        self._num_updates += is_complete
        groups = {replica.group for replica in updated}
        is_due = self._num_updates <= NUM_CHECKED or self._num_updates % NUM_CHECKED == 0
        if is_due or not groups <= self._checked:
            self._checked |= groups
            self._metrics[-1] |= self.start_check(updated)
        if not is_complete:
            return {}
        metrics = merge_metrics(self._metrics)
        self._metrics = []
        return metrics

    def start_check(self, replicas: Sequence[Replica] | None = None) -> Metrics:
        """Score the probe rows with the policy, and with `replicas` unless they share devices.

        None means every replica. Call while the policy is on its devices. See `update`.
        """
        if not self._is_enabled:
            return {}
        if replicas is None:
            replicas = self._generator.live_replicas
        self._unverified = list(replicas)
        if self._is_colocated:
            with self.timers("weight_check"):
                self._expected = self._policy_logprobs()
            return {}
        with self.timers("weight_check"):
            # Started first: both sides compute at the same time.
            scores = self._start_scores()
            self._expected = self._policy_logprobs()
            return self._compare(scores())

    def verify(self) -> Metrics:
        """Compare the generator with the policy if that is due; see `update`.

        Call while the generator is on its devices, before it samples.
        """
        if self._expected is None:
            return {}
        with self.timers("weight_check"):
            scores = self._start_scores()
            return self._compare(scores())

    def _start_scores(self) -> Callable[[], dict[int, Jagged]]:
        """Start to score the probe rows with the replicas that are due; see `start_score`."""
        live = self._generator.live_replicas
        replicas = [each for each in self._unverified if each in live and each.has_weights]
        return self._generator.start_score(self._probe["input_ids"], replicas)

    def _compare(self, scores: Mapping[int, Jagged]) -> Metrics:
        """Compare float32 log-probs of the probe rows, by replica, with the policy's."""
        assert self._expected is not None, "the policy's log-probs come first"
        metrics = self._check.compare(self._expected, scores, self._generator.version)
        self._expected = None
        return metrics

    @cached_property
    def _probe(self) -> BatchedDataDict:
        """The rows that both sides score."""
        rows = probe_rows(self._policy.model.vocab_size, max_length=self._max_length)
        num_tokens = len(rows.values)
        return BatchedDataDict(
            input_ids=rows,
            token_mask=Jagged(np.ones(num_tokens, dtype=np.uint8), rows.offsets),
            length=rows.lengths,
            row_mask=np.ones(len(rows), dtype=bool),
        )

    def _policy_logprobs(self) -> Jagged:
        """Return the policy's log-probs of the probe rows, float32."""
        plan = self._policy.plan(self._probe["length"], "evaluate")
        sharded = self._policy.shard(self._probe, plan)
        logprobs = self._policy.compute_logprobs(sharded, ("prev_logprobs",), as_sampled=False)
        return self._policy.fetch_logprobs(logprobs)["prev_logprobs"]
