"""``profile``: the operations and the memory of one forward and backward, traced without data."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_flag
from funcshard._utils.process_state import without_collection
from funcshard._utils.table import Shown, Table
from funcshard._utils.tensors import is_dtensor
from funcshard._utils.torch_private import asks_for_data, stored_parts
from funcshard._utils.tree import tensors_in
from funcshard.estimate.trace.program import (
    MARGIN,
    Program,
    equal_units,
    make_program,
    merge,
    similar_border,
)
from funcshard.estimate.trace.tape import Tape
from funcshard.estimate.trace.tracing import ModelCall, leaf_dtypes, trace_model
from funcshard.plan import MixedPrecision, Plan, dtype_name, make_plan, match

_T = TypeVar("_T")


def once(made: dict[Any, Any], key: Hashable, make: Callable[[], _T]) -> _T:
    """Return what was made for a key before, or make it."""
    if key not in made:
        made[key] = make()
    value: _T = made[key]
    return value


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Profile(Shown):
    """The trace of one forward and backward; made by ``profile``.

    Attributes:
        retrace: traces the model for a remat set and for modules whose calls are apart.
        dtypes: the dtype in which each parameter was traced, by name.
        tokens: elements of the first input if they're whole numbers; else 0.
        inputs: bytes of the inputs.
        buffers: bytes of the model's buffers.
        forms: the parameters on the meta device, for ``make_plan``.
        precision: that of ``profile``.
        call: the arguments of ``profile``.
    """

    retrace: Callable[..., Tape]
    dtypes: Mapping[str, str]
    tokens: int
    inputs: int
    buffers: int
    forms: Mapping[str, torch.Tensor] = field(default_factory=dict)
    precision: MixedPrecision | None = None
    call: ModelCall | None = None
    # What was made of the profile: tapes, programs, and the profile of a CPU.
    _made: dict[Any, Any] = field(default_factory=dict)

    def tape(self, remat: Iterable[str] = (), apart: Iterable[str] = ()) -> Tape:
        """Return the events of forward, loss and backward.

        Arguments:
            remat: paths of the modules that backward recomputes.
            apart: paths of the modules of which each call has its own gradients.
        """
        # Note: other meshes, strategies and schedules read the same tape.
        key = frozenset(remat), frozenset(apart)
        return once(self._made, ("tape", *key), lambda: self.retrace(*key))

    def on(self, *, accelerator: bool) -> Profile:
        """Return the profile of the same model on a GPU, or on the CPU."""
        # Note: the two differ in attention and dropout; see ``AcceleratorKernels``.
        if accelerator:
            return self

        def on_cpu() -> Profile:
            retrace = functools.partial(self.retrace, accelerator=False)
            return dataclasses.replace(self, retrace=retrace, _made={})

        return once(self._made, "cpu", on_cpu)

    def program(self, plan: Plan, *, remat: Iterable[str] = ()) -> Program:
        """Return the trace as the units of a plan see it.

        Raises:
            ValueError: the plan computes with a parameter in another dtype than the trace.
        """
        self.check(plan)
        remat_names = frozenset(remat)
        paths = {unit.name: unit.paths for unit in plan.unit_list}
        staying_units: frozenset[str] = frozenset()
        if once(self._made, ("nests", *paths), lambda: _nested(paths)):
            # Note: only inside other units it matters which ones stay gathered.
            staying_units = frozenset(
                unit.name for unit in plan.unit_list if not unit.reshard_after_forward
            )

        def make() -> Program:
            if remat_names and (merged_program := self._merged(plan, remat_names)):
                return merged_program
            # Note: calls of a group's members aren't gathered one by one.
            single_paths = [nodes[0] for nodes in paths.values() if len(nodes) == 1]
            repeated_paths = self.tape().repeated(single_paths)
            with without_collection():
                return make_program(
                    self.tape(remat_names, repeated_paths), paths, stays=staying_units
                )

        return once(self._made, (tuple(paths.items()), remat_names, staying_units), make)

    def _merged(self, plan: Plan, remat: frozenset[str]) -> Program | None:
        """Return a program by the steps of others, or ``None`` if that isn't possible."""
        # Note: a trace takes a third of a second, a merge milliseconds. The programs that it takes
        # may be merged themselves, along other equal units.
        base_program = self.program(plan)
        groups: list[tuple[list[str], int]] = []
        for equal_group in sorted(equal_units(plan, base_program), key=len, reverse=True):
            names = [unit.name for unit in equal_group if unit.name in base_program.order]
            wanted_count = len(remat.intersection(names))
            if remat.issuperset(names[:wanted_count]):
                groups.append((names, wanted_count))

        def recomputing(names: Sequence[str], count: int) -> Program:
            return self.program(plan, remat=remat.difference(names).union(names[:count]))

        # Note: similar units, and borders near the first or the last one, take two more traces. A
        # border between units of other kinds takes a third one.
        for margin, borders_of in (
            (MARGIN, _half),
            (0, _half),
            (0, functools.partial(similar_border, base_program)),
        ):
            for names, wanted_count in groups:
                border_count = borders_of(names, wanted_count)
                if (
                    len(names) // 2 > MARGIN
                    and margin < wanted_count < len(names) - margin
                    and border_count != wanted_count
                ):
                    end_counts = (border_count, border_count) if margin else (0, len(names))
                    counts = (*end_counts, border_count)
                    none, all_units, border = (
                        recomputing(names, count) for count in counts
                    )
                    merged_program = merge(
                        none, all_units, border, names, border_count, wanted_count
                    )
                    if merged_program is not None:
                        return merged_program
        return None

    def check(self, plan: Plan) -> None:
        """Raise unless the plan has the parameters and the precision of the profile."""
        for path, (dtype, _) in leaf_dtypes(plan).items():
            traced_dtype, computed_dtype = self.dtypes.get(path), dtype_name(dtype)
            if traced_dtype is None:
                raise ValueError(
                    f"the profile has no parameter {path!r}, which the plan has: "
                    "profile the function for whose params the plan was made"
                )
            if traced_dtype != computed_dtype:
                raise ValueError(
                    f"parameter {path!r} was profiled in {traced_dtype}, but the plan computes in "
                    f"{computed_dtype}: pass profile the precision of the plan"
                )

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of one forward, without the loss."""
        return sum(self._flops("forward").values())

    @property
    def model_flops(self) -> int:
        """Floating-point operations of a step, as ``mfu`` counts them: without recomputation."""
        # Why 3: backward computes the gradients of inputs and of weights, each as much as forward.
        trained_flops = 3 * self.forward_flops
        if all(param.requires_grad for param in self.forms.values()):
            return trained_flops
        # Note: frozen weights have no gradients, so backward computes those of inputs alone.
        return min(
            trained_flops, self.forward_flops + sum(self._flops("backward").values())
        )

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype in which forward has the most FLOPs."""
        flops_by_dtype = self._flops("forward")
        first_dtype = next(iter(self.dtypes.values()), "float32")
        return max(flops_by_dtype, key=flops_by_dtype.__getitem__, default=first_dtype)

    @property
    def saved(self) -> int:
        """Bytes that autograd keeps between forward and backward."""
        return sum(self._root().saved.values())

    def _flops(self, phase: str) -> Mapping[str, int]:
        dtype_flops = Counter[str]()
        for run in self._root().runs():
            if run.what == phase:
                for work in run.work:
                    dtype_flops[work.dtype] += work.flops
        return +dtype_flops  # those above 0

    def _root(self) -> Program:
        return once(self._made, "root", lambda: make_program(self.tape(), {"": ("",)}))

    def _parts(self) -> list[Table]:
        rows = []
        for phase_name in ("forward", "loss", "backward"):
            phase_runs = [run for run in self._root().runs() if run.what == phase_name]
            work = [work for run in phase_runs for work in run.work]
            figures = (
                sum(item.flops for item in work),
                sum(item.bytes for item in work),
                sum(item.kernels for item in work),
                max((run.highest.total for run in phase_runs), default=0),
            )
            rows.append([phase_name, *(f"{figure:,}" for figure in figures)])
        title = f"Profile: autograd keeps {self.saved:,} bytes"
        return [
            Table(
                title, ["phase", "FLOPs", "bytes moved", "kernels", "highest bytes"], rows
            )
        ]


def profile(
    apply: Any,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    /,
    *args: Any,
    loss: Callable[..., torch.Tensor] | None = None,
    targets: Any = None,
    precision: MixedPrecision | Plan | None = None,
    compiled: Iterable[str] = (),
    fold: bool = True,
    **kwargs: Any,
) -> Profile:
    """Trace one forward and backward of your model without data and without processes.

    It runs on fake tensors, so you need no GPU. docs/estimating.md says what it can't see.

    Arguments:
        apply: the function that ``make_functional`` returned.
        params: its parameters, best on the meta device: only shapes and dtypes count.
        buffers: its buffers.
        args: the inputs of one micro-batch of one rank.
        loss: a function of the outputs, and of ``targets`` if you pass them. By default the outputs
            are the loss, or their sum is.
        targets: a tensor or tree of tensors for the loss.
        precision: that of the plans that you'll estimate, or a plan.
        compiled: paths or globs of modules that ``torch.compile`` compiles, each by itself.
        fold: whether one module represents all modules of its kind.
        kwargs: further inputs.

    Returns:
        The profile, for ``estimate`` and ``auto_plan``.

    Raises:
        TypeError: ``apply`` didn't come from ``make_functional``.
        ValueError: the loss isn't a scalar or doesn't depend on a trainable parameter, you pass
            targets but no loss, your model reads values of a tensor, or a parameter is a DTensor.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> found = fs.profile(apply, params, buffers, torch.zeros(16, 4))
        >>> found.forward_flops == 2 * 16 * (4 * 8 + 8 * 1)
        True

    Source: ``torch.distributed._tools.MemTracker`` and ``torch.utils.flop_counter``.
    """
    if not hasattr(apply, "skeleton") or not hasattr(apply, "run"):
        raise TypeError(
            f"profile takes the apply that make_functional returned; found {type(apply).__name__}: "
            "call apply, params, buffers = make_functional(model)"
        )
    check_flag("fold", fold)
    if targets is not None and loss is None:
        raise ValueError(
            "targets are the second argument of a loss; found targets without loss: pass loss=, a "
            "function of the model's outputs and the targets"
        )
    if precision is not None and not isinstance(precision, MixedPrecision | Plan):
        raise TypeError(
            f"precision must be a MixedPrecision, a plan or None; found {precision!r}: wrap a "
            "dtype in the first"
        )
    apply.check_names("params", params, apply.skeleton.parameters)
    apply.check_names("buffers", buffers, apply.skeleton.buffers)
    if dtensor_names := [name for name, param in params.items() if is_dtensor(param)]:
        raise ValueError(
            "profile takes parameters that are plain tensors, because DTensor's own collectives "
            f"cannot be traced; found a DTensor at {dtensor_names[0]!r}: profile the model before "
            "parallelize_module, or cut it with make_plan(local=...)"
        )
    with without_collection():
        plan = (
            precision
            if isinstance(precision, Plan)
            else make_plan(params, 1, precision=precision)
        )
    compiled_modules = match(
        compiled,
        [tuple(names) for names in apply.skeleton.parameters.values()],
        "compiled module",
    )
    dtypes = leaf_dtypes(plan)
    if missing_names := params.keys() - dtypes.keys():
        raise ValueError(
            "precision must be a plan of the same parameters; found a plan without "
            f"{min(missing_names)!r}: pass the plan that make_plan made for these params"
        )
    param_forms = {name: _form(param, dtypes[name][1]) for name, param in params.items()}

    model_call = ModelCall(apply, buffers, args, kwargs, loss, targets, set())
    # Note: estimates trace again later, outside of the caller's autocast.
    autocast_dtype = _autocast()

    def retrace(
        remat: frozenset[str],
        apart: frozenset[str] = frozenset(),
        *,
        accelerator: bool = True,
    ) -> Tape:
        try:
            with (
                without_collection(),
                torch.enable_grad(),
                torch.autocast(
                    "cpu", dtype=autocast_dtype, enabled=autocast_dtype is not None
                ),
            ):
                return trace_model(
                    model_call,
                    plan,
                    param_forms,
                    remat=remat,
                    apart=apart,
                    compiled=compiled_modules,
                    fold=fold,
                    accelerator=accelerator,
                )
        except Exception as error:
            if asks_for_data(error):
                raise ValueError(
                    "the model and the loss must not read values of tensors, because a trace has "
                    f"none; found {error}, as in .item(), .tolist() or a mask as an index: profile "
                    "a model whose shapes and branches are fixed"
                ) from error
            raise

    input_tensors, tokens = tensors_in((args, kwargs)), 0
    if input_tensors and not (
        input_tensors[0].is_floating_point() or input_tensors[0].is_complex()
    ):
        tokens = input_tensors[0].numel()
    new_profile = Profile(
        retrace=retrace,
        dtypes={path: dtype_name(dtype) for path, (dtype, _) in dtypes.items()},
        tokens=tokens,
        inputs=_stored_bytes((args, kwargs, targets)),
        buffers=_stored_bytes(buffers),
        forms=param_forms,
        precision=plan.precision,
        call=model_call,
    )
    # Why now: errors of the model belong to profile, not to the first estimate.
    new_profile.tape()
    return new_profile


def _half(names: Sequence[str], _: int) -> int:
    return len(names) // 2


def _autocast() -> torch.dtype | None:
    """Return the dtype of the active autocast, on any device."""
    for device_type in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
    return None


def _nested(paths: Mapping[str, Sequence[str]]) -> bool:
    nodes = {node for unit_nodes in paths.values() for node in unit_nodes if node}
    return any(len(nodes.intersection(tree.upwards(node))) > 1 for node in nodes)


def _form(param: torch.Tensor, trainable: bool) -> torch.Tensor:
    """Return a parameter on the meta device, with the notes of ``make_functional``."""
    if type(param) is torch.Tensor and param.is_meta and param.requires_grad == trainable:
        return param
    meta_tensor = torch.empty_like(param, device="meta", requires_grad=trainable)
    meta_tensor.__dict__.update(param.__dict__)
    return meta_tensor


def _stored_bytes(tensors: Any) -> int:
    return sum(
        part.nbytes for tensor in tensors_in(tensors) for part in stored_parts(tensor)
    )
