"""A file system, or a network, of a process's own, where the system lets a user make one."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

MOUNTS, NETWORK = 0x00020000, 0x40000000  # CLONE_NEWNS, CLONE_NEWNET
_USERS = 0x10000000  # CLONE_NEWUSER
_PRIVATE = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC
LIBC = ctypes.CDLL(None, use_errno=True)


def enter_namespace(kinds: int) -> None:
    """Move this process of one thread into new namespaces, as their root, or skip the test if the system forbids it."""
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(_USERS | kinds):
        pytest.skip(f"the system forbids namespaces of one's own: {os.strerror(ctypes.get_errno())}")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        pytest.skip(f"the system forbids a map of users: {error}")
    if kinds & MOUNTS and LIBC.mount(b"none", b"/", None, _PRIVATE, None):
        pytest.skip(f"the system forbids mounts of one's own: {os.strerror(ctypes.get_errno())}")


def mount_disk(path: Path, size: int, files: int) -> None:
    """Mount a file system in memory, of ``size`` bytes and at most ``files`` files and folders."""
    options = f"size={size},nr_inodes={files}".encode()
    if LIBC.mount(b"none", str(path).encode(), b"tmpfs", 0, options):
        pytest.skip(f"the system forbids a disk in memory: {os.strerror(ctypes.get_errno())}")
