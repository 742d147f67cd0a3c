"""Kernels for notebooks, forked from the process that the ranks of ``run_ranks`` are forked from.

A kernel in a new interpreter imports torch, Dynamo and this library: five seconds for each
notebook. A forked kernel has its own state all the same, apart from imported modules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.ranks import forking

__all__ = ["Kernel", "launch_kernel"]


class Kernel:
    """A kernel's process, with the part of the interface of ``subprocess.Popen`` that Jupyter uses."""

    stdin = stdout = stderr = None

    def __init__(self, process: Any) -> None:
        self.process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        self.process.terminate()


def launch_kernel(cmd: Sequence[str], *, env: Mapping[str, str], cwd: str, **ignored: Any) -> Kernel:
    """Start a kernel, in place of ``jupyter_client.launcher.launch_kernel``.

    Arguments:
        cmd: the command of a new interpreter; it ends with the options of the kernel.
        env: the environment of the kernel.
        cwd: the folder of the kernel.
        ignored: options of ``subprocess.Popen``.
    """
    own_end, kernel_end = forking().Pipe()
    options = list(cmd[cmd.index("ipykernel_launcher") + 1 :])
    process = forking().Process(target=_run, args=(kernel_end, options, dict(env), cwd), daemon=True)
    process.start()
    kernel_end.close()
    with own_end:
        own_end.recv()  # Jupyter ends a kernel by its process group, which has to be its own by then
    return Kernel(process)


def _run(connection: Connection, options: list[str], env: dict[str, str], cwd: str) -> None:
    os.setsid()
    connection.send("ready")
    connection.close()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance(argv=options)
