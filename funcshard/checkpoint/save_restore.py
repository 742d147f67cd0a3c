"""``save`` and ``restore``: a training state as a checkpoint, which is complete or doesn't exist.

``save`` checks with collectives that all ranks agree. A ``Writer`` in a thread of each rank then
writes the files, without collectives.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard._utils.options import (
    check_count,
    check_flag,
    check_number,
    check_path,
    outline,
)
from funcshard.checkpoint.contents import Contents, read_contents, read_from, save_at
from funcshard.checkpoint.flatten_state import flatten_state
from funcshard.checkpoint.folders import (
    TRIES,
    StrPath,
    begin_save,
    check_replaceable,
    discard,
    pause,
)
from funcshard.checkpoint.rank_files import INDEX, damaged
from funcshard.checkpoint.stored_state import HOW_TO_AGREE, Plans, Tensors
from funcshard.checkpoint.unflatten_state import Saved, unflatten_state
from funcshard.checkpoint.writer import Writer
from funcshard.comm import Mesh, all_gather_texts, check_all_same
from funcshard.core import broadcast, check_mesh, on_every_rank, raise_on_every_rank
from funcshard.plan import Plan

_log = logging.getLogger("funcshard.checkpoint")


@dataclass(slots=True, eq=False)
class Saving:
    """A checkpoint that ``save`` is saving.

    Attributes:
        path: the checkpoint's path.
        memory: the copied state, in the background. A later save reuses its memory if you pass
            ``after``.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> plan, mesh = fs.make_plan({"w": torch.zeros(2)}, 1), fs.Mesh()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saving = fs.save(f"{folder}/step-3", {"step": 3}, plan, mesh, wait=False)
        ...     saving.wait().name, saving.done
        ('step-3', True)
    """

    path: Path
    _mesh: Mesh
    _save: str
    _thread: Writer | None
    memory: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict, repr=False)
    _outcome: str | None = None

    @property
    def done(self) -> bool:
        """Whether this rank has finished its part; other ranks aren't asked."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float = 600.0) -> Path:
        """Wait until the checkpoint is complete, and return its path. Call it on every rank.

        Arguments:
            timeout: seconds that rank 0, once its part is written, waits for those of other ranks.

        Raises:
            OSError: a rank couldn't write its part. Every rank raises it. An earlier checkpoint at
                ``path`` is untouched.
        """
        check_number(
            "timeout", timeout, above=0, remedy="pass a number of seconds, such as 600.0"
        )
        if self._outcome is None:
            if self._thread is not None:
                self._thread.timeout = timeout
            # Why a collective before join: simulated ranks take turns, and join keeps the turn.
            # After the collective every rank has started its thread, so rank 0's thread finds every
            # report.
            all_gather_texts(self._mesh, "")
            own_error = "" if self._thread is None else self._thread.told()
            rank_errors = all_gather_texts(self._mesh, own_error)
            # Rank 0 reports "rank 1 could not write its part"; rank 1 itself says why.
            own_errors = [
                f"rank {rank}: {error_text}"
                for rank, error_text in enumerate(rank_errors)
                if error_text and not error_text.startswith("rank ")
            ]
            self._outcome = "; ".join(own_errors) or next(filter(None, rank_errors), "")
            self._thread = None
            if self._outcome:
                discard(self.path, self._save)
            else:
                _log.debug("checkpoint %s is complete", self.path)
        if self._outcome:
            raise OSError(f"checkpoint {self.path} is not saved: {self._outcome}")
        return self.path


def save(
    path: StrPath,
    state: Any,
    plan: Plans,
    mesh: Mesh,
    *,
    wait: bool = True,
    after: Saving | None = None,
    keep: int | None = None,
) -> Saving:
    """Save your state as a checkpoint; ``restore`` is the inverse. Call it on every rank.

    Each rank writes what it holds of your state:

    - Trees of shards are stored as they are, with the plan, so you can restore them under another
      plan. They're recognised by their form: parameters, averages of them, optimizer states.
    - Every other tensor, number and string must be the same on every rank.
    - Mark a value of each rank's own with ``PerRank``.

    A crash at any moment leaves the old checkpoint, the new one, or a folder that ``latest`` skips.

    Arguments:
        path: the folder to make, on a file system that all ranks share. A checkpoint there is
            replaced; anything else there is an error.
        state: any pytree, such as ``{"train": TrainState, "ema": shards, "own": PerRank(...),
            "epoch": 3}``.
        plan: the plan of the shards in your state. If you have several models, a dictionary of
            plans, with the keys of their entries in ``state``.
        mesh: the ranks.
        wait: ``False`` copies the state to the CPU, and a thread writes it while you train. Call
            ``wait()`` of the ``Saving`` later. If you don't, your program waits for the checkpoint
            at its end, and exits with code 1 if it can't be saved.
        after: the ``Saving`` of an earlier save, to wait for first. Its memory is reused.
        keep: number of checkpoints to keep in the parent folder, with this one; by default all.

    Returns:
        A ``Saving``, whose ``wait()`` returns the path.

    Raises:
        TypeError: a leaf is neither a tensor nor a number or string, or an option has the wrong
            type.
        ValueError: ``keep`` isn't positive; a tree of shards doesn't match the plan; ranks differ
            in a value; ``path`` holds something else, or its name begins with a dot; or another
            save to ``path`` is running.
        OSError: a rank couldn't write its part. With ``wait=False``, ``wait()`` raises it.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params = {"w": torch.arange(4.0)}
        >>> def main(mesh, folder):
        ...     plan = fs.make_plan(params, mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     state = {"shards": shards, "step": 7, "own": fs.PerRank(mesh.rank)}
        ...     fs.save(f"{folder}/step-7", state, plan, mesh)
        ...     return fs.restore(f"{folder}/step-7", plan, mesh)["shards"][""]["float32"].tolist()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fs.simulate(lambda mesh: main(mesh, folder), world_size=2)
        [[0.0, 1.0], [2.0, 3.0]]
    """
    path = check_path("path", path).absolute()
    check_flag("wait", wait)
    if keep is not None:
        remedy = "1 keeps the checkpoint that is saved"
        keep = check_count("keep", keep, of="checkpoints", none="for all", remedy=remedy)
    if after is not None:
        if not isinstance(after, Saving):
            raise TypeError(
                f"after must be the Saving that an earlier save returned, or None; found {after!r}"
            )
        # Note: also frees rank 0's lock, if the same path is saved to again.
        after.wait()
    _check_plans(plan, mesh, {"path": str(path)})
    # Why secrets: random would shift the user's numbers, and equal seeds give equal tokens.
    save_lock, drawn_token = None, secrets.randbits(32)
    # Note: until the thread has it, an error gives back the lock and deletes the files.
    with ExitStack() as undo_stack:
        with on_every_rank(mesh):
            if mesh.rank == 0:
                check_replaceable(path)
            # Note: the state is checked before the first file is made.
            flat_state = flatten_state(state, plan, mesh.rank, mesh.device.type)
            own_texts = flat_state.texts()
            if mesh.rank == 0:  # at the end, because it makes the first file
                save_lock = begin_save(path, f"{drawn_token:08x}")
                undo_stack.callback(discard, path, f"{drawn_token:08x}")
                undo_stack.callback(save_lock.release)  # first, because discard takes it
        # Note: rank 0 drew it; with it the names of all files of this save begin.
        token = _agree(own_texts, mesh, drawn_token)
        written_tensors: Tensors = flat_state.tensors
        with on_every_rank(mesh):  # such as no memory for the copy
            # Note: rank 0 has made this file, so a rank that lacks it writes to another disk.
            if not (path / f"{token}.part").exists():
                raise OSError(
                    f"rank 0 made a file in {path}, and this rank does not see it: save to a "
                    "folder on a file system that all machines of the job share"
                )
            if not wait:
                written_tensors = _copied(
                    flat_state.tensors, {} if after is None else after.memory
                )
        if not wait and after is not None:
            after.memory = {}  # another save after the same one must not write there
        # Note: the thread issues no collectives; it meets other ranks through files alone.
        thread = Writer(
            path=path, save=token, plans=plan, flat=flat_state, tensors=written_tensors, mesh=mesh,
            keep=keep, lock=save_lock, in_background=not wait,
        )  # fmt: skip
        if thread.started():
            undo_stack.pop_all()  # from now on the thread has the lock
    _log.debug("checkpoint %s: this rank writes %d tensors", path, len(written_tensors))
    saving = Saving(path, mesh, token, thread, {} if wait else written_tensors)
    if wait:
        saving.wait()
    return saving


def restore(
    path: StrPath,
    plan: Plans | None = None,
    mesh: Mesh | None = None,
    *,
    cast: bool = False,
) -> Any:
    """Restore a state that you saved, under any plan of the model, or describe a checkpoint.

    ``restore(path, plan, mesh)`` returns the state; call it on every rank. ``restore(path)``
    describes the checkpoint. No code of the checkpoint runs.

    Arguments:
        path: the checkpoint's folder, such as ``latest(folder)``.
        plan: your plan to cut the shards by, which may have other units, strategies and ranks than
            the saved one. Rank ``r`` takes the ``PerRank`` values of old rank ``r`` modulo the old
            number of ranks. If you have several models, a dictionary of plans with the saved keys.
        mesh: the ranks, in the plan's shape.
        cast: whether to convert shards of the parameters' dtypes to those of ``plan``. By default
            other dtypes are an error. Shards in another dtype than the parameters, such as
            averages, stay as they are.

    Returns:
        The state, in the saved types, on the mesh's device; tensors that were on the CPU beside
        another device are on the CPU again. Without ``plan`` and ``mesh``, a ``Contents``.

    Raises:
        FileNotFoundError: there is no folder at ``path``.
        ValueError: the checkpoint is incomplete or damaged, or the plan is of another model or of
            other dtypes. Every rank raises the same error.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params = {"w": torch.arange(4.0)}
        >>> def begin(mesh, path):
        ...     plan = fs.make_plan(params, mesh)
        ...     fs.save(path, fs.shard(params, plan, mesh), plan, mesh)
        >>> def go_on(mesh, path):
        ...     return fs.restore(path, fs.make_plan(params, mesh), mesh)[""]["float32"].tolist()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fs.simulate(lambda mesh: begin(mesh, f"{folder}/last"), world_size=2)
        ...     fs.simulate(lambda mesh: go_on(mesh, f"{folder}/last"), world_size=3)
        [[0.0, 1.0], [2.0, 3.0], [0.0, 0.0]]
    """
    if path is None:
        raise ValueError(
            "restore takes the path of a checkpoint; found None, which latest returns for a "
            "folder without a complete checkpoint: start from the beginning in that case"
        )
    path = check_path("path", path)
    if plan is None and mesh is None:
        return read_from(path, Contents.check_files)
    if plan is None or mesh is None:
        raise ValueError(
            "restore takes a path alone, to describe the checkpoint, or a path, a plan and a "
            f"mesh, to restore it; found no {'plan' if plan is None else 'mesh'}"
        )
    check_flag("cast", cast)
    _check_plans(plan, mesh, {"the options of restore": f"cast={cast!r}"})
    for attempt in range(TRIES):
        fault: Exception | None = None
        state, read_save = None, save_at(path)
        try:
            contents = read_contents(path)
            read_save = contents.save
            # Note: it reads and communicates with nobody, so ranks may fail at different places.
            state = _read_state(contents, plan, mesh, cast)
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            fault = damaged(Path(path, INDEX), error)
        except Exception as error:  # of any kind, because other ranks wait
            fault = error
        # Note: a save may replace the checkpoint while ranks read it, and they may meet both.
        own_report = json.dumps([read_save, save_at(path), fault is not None])
        # Why a set: most ranks report the same, and only what differs decides.
        rank_reports = [json.loads(text) for text in {*all_gather_texts(mesh, own_report)}]
        has_failed = any(failed for _, _, failed in rank_reports)
        if not has_failed and len({read_save for read_save, _, _ in rank_reports}) == 1:
            _log.debug("checkpoint %s is restored on %d ranks", path, mesh.world_size)
            return state
        # Note: of one rank before and after its read, or of two ranks.
        was_replaced = len({save for report in rank_reports for save in report[:2]}) > 1
        # Note: after a replacement, all ranks begin again together, because all have these reports.
        if not was_replaced or attempt == TRIES - 1:
            raise_on_every_rank(mesh, fault)
            raise ValueError(
                f"ranks found different checkpoints at {path}: it was replaced meanwhile, or ranks "
                "do not share a file system; restore again, from a path that no process is saving "
                "to"
            )
        pause(attempt)
    raise AssertionError


def _read_state(contents: Contents, plan: Plans, mesh: Mesh, cast: bool) -> Any:
    if _keys(contents.plan) != _keys(plan):
        raise ValueError(
            f"the checkpoint {contents.path} was saved under {_keys(contents.plan)}; found "
            f"{_keys(plan)}: pass plans with the same keys"
        )
    # Note: a new rank takes the PerRank values of one old rank; the lists need not be equal.
    own_table = contents.table(mesh.rank % contents.world_size)
    stored_facts = {**contents.shared, **own_table.stored}
    title = f"checkpoint {contents.path}"
    with contents.reader() as reader:
        saved_state = Saved(
            contents.outline, own_table.own, stored_facts, contents.plan, reader.read, title
        )
        return unflatten_state(saved_state, plan, mesh.rank, mesh.device, cast=cast)


def _check_plans(plan: Plans, mesh: Mesh, options: Mapping[str, str]) -> None:
    plans = plan if isinstance(plan, Mapping) else {"": plan}
    if not plans or not all(isinstance(key, str) for key in plans):
        raise TypeError(
            "plan must be a plan, or a dictionary of plans by keys of the state; found "
            f"{outline(plan)}: pass what make_plan returned"
        )
    # Note: all ranks compare as many plans, because the first comparison is of the keys too.
    options = {"the keys of the plans": str(sorted(plans)), **options}
    for _, entry_plan in sorted(plans.items()):
        check_mesh(entry_plan, mesh, options)


def _keys(plan: Plans) -> str:
    return (
        "one plan"
        if isinstance(plan, Plan)
        else f"plans for {', '.join(map(repr, sorted(plan)))}"
    )


def _agree(texts: dict[str, str], mesh: Mesh, drawn: int) -> str:
    """Check that ranks agree on the state, and return rank 0's token."""
    check_all_same(mesh, texts, "a save", remedy=HOW_TO_AGREE)
    # Why no text: ranks that gather texts send all of them if one differs.
    token_tensor = torch.tensor(drawn, device=mesh.device)
    broadcast(token_tensor, 0, mesh, label="token of a save")
    # Why int: the host waits for the stream here, so the thread that writes reads finished tensors.
    return f"{int(token_tensor):08x}"


def _copied(
    tensors: Mapping[str, torch.Tensor], memory: Mapping[str, torch.Tensor]
) -> Tensors:
    """Return copies of tensors on the CPU, in the memory of earlier ones if they're like them."""
    tensor_copies: Tensors = {}
    for name, tensor in tensors.items():
        copy = memory.get(name)
        # Why use memory again: new pages take the system several times as long as a copy.
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        tensor_copies[name] = copy.copy_(tensor)
    return tensor_copies
