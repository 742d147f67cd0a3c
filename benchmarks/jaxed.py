"""Start and drive the JAX peer (``gspmd.py``) in a process under an interpreter that has JAX."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import BATCHES, Shape

TIMEOUT = 600.0


def has_jax(python: str) -> bool:
    """Return whether the interpreter has JAX and NumPy, and this one NumPy to write the input file."""
    probe = "import importlib.util as u; raise SystemExit(not (u.find_spec('jax') and u.find_spec('numpy')))"
    try:
        import numpy  # noqa: F401
    except ImportError:
        return False
    return subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0


class Jax:
    """One process that trains a shape on ``ranks`` virtual devices; a context manager."""

    def __init__(self, shape: Shape, ranks: int, python: str = sys.executable) -> None:
        import numpy as np

        self._directory = tempfile.TemporaryDirectory(prefix="race-jax-")
        path = Path(self._directory.name) / "start.npz"
        arrays: dict[str, Any] = {f"param:{k}": p.detach().numpy() for k, p in shape.module().named_parameters()}
        batches_of_ranks = [shape.batches(rank) for rank in range(ranks)]
        for i in range(BATCHES):
            for position, kind in enumerate(("inputs", "targets")):
                arrays[f"{kind}:{i}"] = torch.cat([batches[i][position] for batches in batches_of_ranks]).numpy()
        np.savez(path, **arrays)
        script = Path(__file__).with_name("gspmd.py")
        self._errors = open(Path(self._directory.name) / "errors", "w+")  # noqa: SIM115  # stays open
        self._process = subprocess.Popen(
            [python, str(script), str(path), str(ranks), str(shape.heads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, bufsize=1,
        )  # fmt: skip
        self.version = self._answer()["jax"]

    def __enter__(self) -> Jax:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()
        self._directory.cleanup()

    def steps(self, number: int) -> tuple[float, list[float]]:
        """Take ``number`` steps; return the seconds, and each step's loss over the whole batch."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer["losses"]

    def _answer(self) -> Any:
        out = self._process.stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            line = out.readline() if selector.select(TIMEOUT) else ""
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"the JAX process did not answer:\n{self._errors.read()[-4000:]}")
        return json.loads(line)
