"""Removal and size of a scratch directory that an untrusted program has written."""

from __future__ import annotations

import os


def remove_scratch(path: str) -> None:
    """Remove a directory with its content; nothing else, whatever links it has.

    The program must have ended. Directories without permissions are removed, and nested ones of any
    depth. Does nothing if the directory does not exist.
    """
    if not os.path.isdir(path) or os.path.islink(path):
        return
    num_moved = 0
    os.chmod(path, 0o700)
    while entries := list(os.scandir(path)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if not inner.is_dir(follow_symlinks=False):
                    os.unlink(inner.path)
                    continue
                # Moved up instead of entered: its path may be longer than the system allows.
                os.chmod(inner.path, 0o700)
                num_moved += 1
                os.rename(inner.path, _free_name(path, num_moved))
            os.rmdir(entry.path)
    os.rmdir(path)


def size_bytes(path: str, max_bytes: int) -> int:
    """Return the size of the files below `path`; stops counting above `max_bytes`.

    Each file and directory counts at least 4 KiB. A directory that cannot be read, which would hide
    files, exceeds the limit. Works while the program runs.
    """
    total = 0
    directories = [path]
    while directories and total <= max_bytes:
        try:
            with os.scandir(directories.pop()) as entries:
                for entry in entries:
                    total += 4096
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if total > max_bytes:
                        break
        except FileNotFoundError:
            # Removed meanwhile.
            continue
        except OSError:
            return max_bytes + 1
    return total


def _free_name(directory: str, number: int) -> str:
    path = os.path.join(directory, f".moved-{number}")
    while os.path.lexists(path):
        path += "_"
    return path
