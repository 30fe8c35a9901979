"""The turns of a sender and its receivers, which are threads of this process here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.weight_sync.channel import BucketLayout, ChannelBrokenError, ChannelSpec
from nemo_like.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender

NUM_BYTES = 5000


def joined(
    num_receivers: int, timeout_s: float = 20.0
) -> tuple[SharedMemorySender, list[SharedMemoryReceiver]]:
    sender = SharedMemorySender(NUM_BYTES, timeout_s)
    spec = ChannelSpec(
        transport="shared_memory",
        layouts=(BucketLayout.of({"w": (NUM_BYTES,)}, torch.uint8),),
        slot_bytes=NUM_BYTES,
        timeout_s=timeout_s,
        address=sender.address,
    )
    receivers = [SharedMemoryReceiver(spec) for _ in range(num_receivers)]
    sender.connect()
    return sender, receivers


def send(sender: SharedMemorySender, values: Sequence[int]) -> int:
    for index, value in enumerate(values):
        sender.buffer(index).fill_(value)
        sender.publish(index, NUM_BYTES)
    return sender.finish()


def receive(receiver: SharedMemoryReceiver, num_buckets: int, delay_s: float) -> list[set[int]]:
    """The distinct bytes of each bucket."""
    received = []
    for index in range(num_buckets):
        bucket = receiver.receive(index)
        time.sleep(delay_s)
        received.append(set(bucket.tolist()))
        receiver.loaded()
    receiver.finish()
    return received


@given(
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=6), min_size=1, max_size=3),
    st.lists(st.sampled_from([0.0, 0.001, 0.01]), min_size=1, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_every_receiver_reads_every_bucket_of_every_update_once(
    updates: list[list[int]], delays: list[float]
) -> None:
    sender, receivers = joined(len(delays))
    with ThreadPoolExecutor(len(receivers)) as pool:
        for values in updates:
            calls = [
                pool.submit(receive, receiver, len(values), delay_s)
                for receiver, delay_s in zip(receivers, delays, strict=True)
            ]
            # Two slots, rounded up to pages, of which one bucket uses only one.
            assert 0 < send(sender, values) <= 2 * 8192
            for call in calls:
                assert call.result() == [{value} for value in values]
    for end in (sender, *receivers):
        end.close()


def test_a_receiver_that_leaves_or_is_late_does_not_stop_the_others() -> None:
    sender, (prompt, late, gone) = joined(3, timeout_s=3.0)
    gone.close()
    with ThreadPoolExecutor(2) as pool:
        start = time.monotonic()
        sent = pool.submit(send, sender, [1, 2, 3, 4])
        received = pool.submit(receive, prompt, 4, 0.0)
        assert set(late.receive(0).tolist()) == {1}
        assert received.result() == [{1}, {2}, {3}, {4}]
        sent.result()
        assert time.monotonic() - start < 60.0, "not three seconds for each bucket and receiver"
    late.receive(1)
    with pytest.raises(ChannelBrokenError, match="has ended, or has left the channel"):
        late.receive(2)
    for end in (sender, prompt, late):
        end.close()


def test_a_receiver_finds_a_sender_that_leaves_or_is_late() -> None:
    sender, (first, second) = joined(2, timeout_s=0.5)
    sender.buffer(0)
    sender.publish(0, NUM_BYTES)
    first.receive(0)
    with pytest.raises(ChannelBrokenError, match=r"took more than 1 s"):
        first.receive(1)
    sender.close()
    with pytest.raises(ChannelBrokenError, match="has ended, or has left the channel"):
        second.receive(0)
        second.receive(1)
    for end in (first, second):
        end.close()
