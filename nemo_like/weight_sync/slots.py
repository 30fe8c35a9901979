"""Slots for buckets, and the sockets by which a sender and its receivers take turns with them.

Bucket i is in slot i mod 2, and is written after all receivers have loaded bucket i - 2. Both sides
are on one machine. A socket has what flags in shared memory lack: the kernel closes it with its
process, whatever ends that, so the other side is told at once; waiting needs no polling; and a
message orders the memory accesses of both sides.

A receiver that ends, or that does not load a bucket in time, is left out. It reports that itself,
or its end does, so the sender continues with the others.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from multiprocessing.connection import wait

from torch import Tensor

from nemo_like.distributed import activity
from nemo_like.weight_sync.channel import ChannelBrokenError, ChannelReceiver, ChannelSender

NAME = "nemo_like_weights"
"""Beginning of the names of sockets and of shared memory."""

NUM_SLOTS = 2
"""One bucket is loaded while the next is gathered."""

_NOTE_S = 0.5
"""Between two notes of progress of a process that waits for another. The driver finds the one that
hangs."""
_MAX_MESSAGE_BYTES = 2**16
_READY = b"ready"

_GONE = "the policy's process has ended, or has left the channel"


class SlotSender(ChannelSender):
    """The slots of one process and the sockets to the receivers that read them."""

    def __init__(self, timeout_s: float) -> None:
        """Listen for receivers; they have `timeout_s` to load a bucket."""
        self._timeout_s = timeout_s
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.name = f"{NAME}_{secrets.token_hex(8)}"
        # An abstract name, which no file has that would outlive the process.
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(socket.SOMAXCONN)
        self._num_loaded: dict[socket.socket, int] = {}
        """Messages of each receiver in this update: one per loaded bucket, one at the end."""
        self._num_published = 0
        self._slots: list[Tensor] = []

    def connect(self) -> None:
        """Accept the receivers, which have called already."""
        self._listener.setblocking(False)
        while True:
            try:
                receiver, _ = self._listener.accept()
            except BlockingIOError:
                break
            if _is_own_user(receiver):
                self._num_loaded[receiver] = 0
        self._listener.close()

    def buffer(self, index: int) -> Tensor:
        """Return the slot of bucket `index`, uint8 [slot_bytes]; waits until it is free."""
        if index == 0:
            self._num_loaded = dict.fromkeys(self._num_loaded, 0)
            self._num_published = 0
            self._slots, message, descriptors = self._create_slots()
            self._send(message, descriptors)
        self._wait_until_loaded(index + 1 - NUM_SLOTS)
        return self._slots[index % NUM_SLOTS]

    def publish(self, index: int, num_bytes: int) -> None:
        """Let the receivers read the slot of bucket `index`."""
        self._num_published += 1
        self._send(_READY, [])

    def finish(self) -> int:
        """Release the slots when no receiver uses them; returns the bytes of their memory."""
        self._wait_until_loaded(self._num_published + 1)
        self._slots = []
        return self._release_slots()

    def close(self) -> None:
        """Leave the receivers and release the slots."""
        self._listener.close()
        for receiver in list(self._num_loaded):
            self._leave(receiver)
        self._slots = []
        self._release_slots()

    def _create_slots(self) -> tuple[list[Tensor], bytes, list[int]]:
        """Allocate the slots, uint8 [slot_bytes] each, for one update.

        Also returns the message, with file descriptors, that tells receivers how to open them.
        """
        raise NotImplementedError

    def _release_slots(self) -> int:
        """Release what `_create_slots` allocated beside the tensors; returns the bytes of all."""
        raise NotImplementedError

    def _send(self, message: bytes, descriptors: list[int]) -> None:
        for receiver in list(self._num_loaded):
            try:
                socket.send_fds(receiver, [message], descriptors)
            except OSError:
                self._leave(receiver)

    def _wait_until_loaded(self, num_loaded: int) -> None:
        """Wait until all receivers have sent this number of messages; leave those that do not."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            behind = [each for each, num in self._num_loaded.items() if num < num_loaded]
            if not behind:
                return
            activity.note("waiting until a weight bucket is loaded")
            for receiver in wait(behind, _NOTE_S):
                assert isinstance(receiver, socket.socket), "one of `behind`"
                if _read(receiver)[0]:
                    self._num_loaded[receiver] += 1
                else:
                    self._leave(receiver)
            if time.monotonic() > deadline:
                for receiver in behind:
                    if self._num_loaded.get(receiver, num_loaded) < num_loaded:
                        self._leave(receiver)

    def _leave(self, receiver: socket.socket) -> None:
        self._num_loaded.pop(receiver, None)
        receiver.close()


class SlotReceiver(ChannelReceiver):
    """The opened slots of a sender on this machine."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """Call the sender of this name. Raises ChannelBrokenError if it is gone."""
        self._timeout_s = timeout_s
        self._slots: list[Tensor] = []
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sender.connect(f"\0{name}")
        except OSError as error:
            self._sender.close()
            raise ChannelBrokenError(f"{_GONE} ({error})") from error
        if not _is_own_user(self._sender):
            raise ChannelBrokenError("the policy's process belongs to another user")

    def receive(self, index: int) -> Tensor:
        """Return the slot with bucket `index`, uint8 [slot_bytes]."""
        if index == 0:
            self._slots = self._open_slots(*self._next_message())
        self._next_message()
        return self._slots[index % NUM_SLOTS]

    def loaded(self) -> None:
        """Let the sender write into the slot again."""
        try:
            self._sender.send(_READY)
        except OSError as error:
            raise ChannelBrokenError(f"{_GONE} ({error})") from error

    def finish(self) -> int:
        """Release the slots; returns 0, because their memory is the sender's."""
        self._slots = []
        self._close_slots()
        SlotReceiver.loaded(self)
        return 0

    def close(self) -> None:
        """Leave the sender and release the slots."""
        self._slots = []
        self._close_slots()
        self._sender.close()

    def _open_slots(self, message: bytes, descriptors: list[int]) -> list[Tensor]:
        """Return the slots, uint8 [slot_bytes] each, that the sender created for this update."""
        raise NotImplementedError

    def _close_slots(self) -> None:
        """Release what `_open_slots` took beside the tensors."""

    def _next_message(self) -> tuple[bytes, list[int]]:
        # The sender waits up to `timeout_s` for another receiver.
        timeout_s = 2 * self._timeout_s
        deadline = time.monotonic() + timeout_s
        while not wait([self._sender], _NOTE_S):
            activity.note("waiting for a weight bucket")
            if time.monotonic() > deadline:
                raise ChannelBrokenError(f"a weight bucket took more than {timeout_s:g} s")
        message, descriptors = _read(self._sender)
        if not message:
            raise ChannelBrokenError(_GONE)
        return message, descriptors


def _read(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message with its file descriptors; empty if the other side is gone."""
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, NUM_SLOTS)
    except OSError:
        return b"", []
    return message, descriptors


def _is_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end has the user of this process.

    Every process of the machine can open an abstract name.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return user == os.geteuid()
