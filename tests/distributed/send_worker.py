"""Sends the command, environment and standard files of a Ray worker to the process that forks it;
standard library only, as it is started for every worker.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET = "NEMO_LIKE_TEST_FORK_SOCKET"
NUM_FILES = 3


def main() -> None:
    command = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [json.dumps(command).encode()], list(range(NUM_FILES)))
        connection.recv(16)


if __name__ == "__main__":
    main()
