"""``prepare``: let a CPU build of torch hold fake tensors of device "cuda", and differentiate them.

A CPU build makes such tensors, but ends the process as soon as autograd sees one: autograd asks the
device for its current stream, and the build has no code for CUDA. ``device.cpp`` holds a stand-in
of 30 lines, whose streams and events do nothing. With it autograd behaves as on a GPU: backward
runs in a thread of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("device.cpp")


def missing() -> str:
    """Return the reason why this machine cannot run dry, or ``""`` if it can."""
    if sys.platform != "linux":
        return "dry runs need Linux"
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        return "dry runs need a build of torch without CUDA, whose driver they take the place of"
    return "" if shutil.which("g++") else "dry runs need g++, for a stand-in of torch's CUDA library"


def prepare() -> None:
    """Compile and load the stand-in, for the rest of this process; on a build with CUDA do nothing.

    Call it before the first backward of the process, because torch then counts the devices. A
    process that has run backward can fork one that calls this.
    """
    if not torch.backends.cuda.is_built():
        ctypes.CDLL(str(_compiled(Path(torch.__file__).parent))).register_dry_cuda()


def _compiled(folder: Path) -> Path:
    """Return the compiled stand-in, which is kept for later runs (about 4 s of a processor)."""
    key = hashlib.sha256(f"{torch.__version__} {folder}".encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"funcshard-dry-{os.getuid()}" / f"{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(mode=0o700, exist_ok=True)
    mine = target.with_suffix(f".{os.getpid()}")
    command = ["g++", "-O0", "-std=c++20", "-fPIC", "-shared", f"-I{folder / 'include'}", str(_SOURCE), "-o", str(mine)]
    command += [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"g++ could not compile {_SOURCE}:\n{result.stderr[-2000:]}")
    mine.replace(target)  # in one step, since another process may compile it too
    return target
