"""Programs that attack the machine they run on. Each raises, or is ended, where it fails.

A program gets the paths and numbers that it needs as constants in front of its source.
"""

from __future__ import annotations

FORK_BOMB = """
import os
while True:
    os.fork()
"""
INFINITE_LOOP = "while True: pass"
HUGE_ALLOCATION = "data = bytearray(10 << 30)"
WRITES_HOME = """
import os
for home in (HOME, os.path.expanduser("~")):
    with open(os.path.join(home, MARKER), "w") as file:
        file.write("x")
"""
READS_ENVIRONMENT = """
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/*/environ"):
    try:
        print(open(path, "rb").read())
    except OSError:
        pass
print(open(f"/proc/{os.getppid()}/environ").read(), os.environ[SECRET_NAME])
"""
OPENS_SOCKET = """
import socket
listener = socket.socket()
listener.bind(("127.0.0.1", PORT))
listener.listen()
"""
KILLS_PARENT = """
import os
os.kill(os.getppid(), 9)
"""
PRINTS_1_GB = """
block = "x" * (1 << 20)
for _ in range(1024):
    print(block)
"""
STARTS_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        time.sleep(1000)
    os._exit(0)
os.wait()
"""
SYMLINK_ESCAPE = """
import os
os.symlink(HOME, "home")
os.symlink("/", "root")
for path in (f"home/{MARKER}", f"root/{HOME}/{MARKER}", f"../{HOME}/{MARKER}"):
    with open(path, "w") as file:
        file.write("x")
"""

ISSUE = {
    "fork_bomb": FORK_BOMB,
    "infinite_loop": INFINITE_LOOP,
    "huge_allocation": HUGE_ALLOCATION,
    "writes_home": WRITES_HOME,
    "reads_environment": READS_ENVIRONMENT,
    "opens_socket": OPENS_SOCKET,
    "kills_parent": KILLS_PARENT,
    "prints_1_gb": PRINTS_1_GB,
    "starts_daemon": STARTS_DAEMON,
    "symlink_escape": SYMLINK_ESCAPE,
}

MORE = {
    "reads_files": "print(open(SECRET_FILE).read())",
    "stops_itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "deletes_scratch": "import os, shutil\nshutil.rmtree(os.getcwd())",
    "many_files": """
number = 0
while True:
    number += 1
    with open(f"file-{number}", "w") as file:
        file.write("x" * 100_000)
""",
    "zombies": """
import os
while True:
    if os.fork() == 0:
        os._exit(0)
""",
    "ignores_signals": """
import os, signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    os.getpid()
""",
    "forks_and_sleeps": """
import os, time
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        time.sleep(0.001)
""",
    "many_allocations": """
import os, time
for _ in range(6):
    if os.fork() == 0:
        break
data = b"x" * (60 << 20)
time.sleep(1000)
""",
    "traces_others": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, os.getppid(), 0, 0) != 0:
    raise OSError(ctypes.get_errno())
""",
    "new_namespaces": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) != 0:
    raise OSError(ctypes.get_errno())
""",
    "shared_memory": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.shmget(0, 1 << 20, 0o1600) < 0 and libc.memfd_create(b"x", 0) < 0:
    raise OSError(ctypes.get_errno())
""",
    "datagram_pair": """
import socket
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
pair[0].sendto(b"x", "/run/systemd/journal/socket")
""",
    "packet_pair": """
import socket
socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
""",
    "binds_pair": """
import socket
socket.socketpair()[0].bind("file")
""",
    "connects_pair": """
import socket
try:
    socket.socketpair()[0].connect("/run/systemd/journal/stdout")
except PermissionError:
    raise
except OSError:
    pass  # The call reached the kernel.
""",
    "asynchronous_io": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 206, "aarch64": 0}[os.uname().machine]
if libc.syscall(number, 100, ctypes.byref(ctypes.c_ulong())) != 0:
    raise OSError(ctypes.get_errno())
""",
    "many_directories": """
import os
number = 0
while True:
    number += 1
    os.mkdir(str(number))
""",
    "changes_modes": """
import os
os.chmod(HOME, 0)
""",
    "deep_directories": """
import os
for _ in range(100_000):
    os.mkdir("d")
    os.chdir("d")
    os.chmod(".", 0o300)
""",
}
