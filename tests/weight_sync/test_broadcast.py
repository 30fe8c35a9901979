"""Forming a broadcast group, whose members are threads of this process here."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from nemo_like.distributed import activity
from nemo_like.weight_sync import broadcast
from nemo_like.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from nemo_like.weight_sync.channel import (
    BucketLayout,
    ChannelBrokenError,
    ChannelRequest,
    ChannelSpec,
)

CPU = torch.device("cpu")
NUM_BYTES = 64


def _sender(num_receivers: int) -> tuple[BroadcastSender, ChannelSpec]:
    request = ChannelRequest(
        transport="gloo",
        dtype="uint8",
        max_bytes=NUM_BYTES,
        num_receivers=num_receivers,
        host="127.0.0.1",
        timeout_s=60.0,
    )
    sender = BroadcastSender(request, NUM_BYTES, CPU)
    spec = ChannelSpec(
        transport="gloo",
        layouts=(BucketLayout.of({"w": (NUM_BYTES,)}, torch.uint8),),
        slot_bytes=NUM_BYTES,
        timeout_s=60.0,
        address=sender.address,
    )
    return sender, spec


def test_a_member_that_waits_for_others_reports_progress() -> None:
    """Otherwise it would be taken for a hung one at its progress deadline."""
    sender, spec = _sender(2)
    with ThreadPoolExecutor(3) as pool:
        first: Future[BroadcastReceiver] = pool.submit(BroadcastReceiver, spec, 0, CPU)
        connected = pool.submit(sender.connect)
        before = activity.last().num_notes
        deadline = time.monotonic() + 20.0
        while activity.last().num_notes < before + 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        num_notes = activity.last().num_notes - before
        second = BroadcastReceiver(spec, 1, CPU)
        connected.result()
        sender.buffer(0)[:] = torch.arange(NUM_BYTES)
        received = [pool.submit(each.receive, 0) for each in (first.result(), second)]
        sender.publish(0, NUM_BYTES)
        for buffer in received:
            assert buffer.result().tolist() == list(range(NUM_BYTES))
    assert num_notes >= 20


def test_a_member_that_does_not_come_breaks_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "JOIN_TIMEOUT_S", 0.2)
    sender, _ = _sender(1)
    with pytest.raises(
        ChannelBrokenError, match=r"not all of the 2 members .* timed out after 0\.2"
    ):
        sender.connect()
