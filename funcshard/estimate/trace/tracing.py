"""``trace_model``: run a model once without data, and write down its memory and its operations.

torch's fake tensors have shapes and storages but no data. So the tape has all that your model does:
checkpoints, casts, attention kernels, the loss. Of modules of one kind that are called with equal
inputs, one runs and a ``Stub`` represents the others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from funcshard._utils import tree
from funcshard._utils.closures import emptied_caches
from funcshard._utils.torch_fakes import fake_tensors
from funcshard._utils.torch_private import (
    outer_saved_tensors_hooks,
    refresh_flat_weights,
    storage_id,
    transforms_active,
    version,
)
from funcshard._utils.tree import map_tensors, tensors_in
from funcshard.core import cast_inputs, cast_outputs, remat, run_in_full_precision
from funcshard.estimate.trace.compiled import Region
from funcshard.estimate.trace.folding import CannotFoldError, Stub, Traced, fold_log
from funcshard.estimate.trace.kernels import AcceleratorKernels
from funcshard.estimate.trace.kinds import is_plain, kinds_of, order_below, value_of
from funcshard.estimate.trace.leaves import Leaves, Table
from funcshard.estimate.trace.recorder import Frame, Recorder
from funcshard.estimate.trace.tape import LOSS, Enter, Exit, Form, Save, Tape
from funcshard.plan import Plan

Loss = Callable[..., torch.Tensor]

_ATTEMPTS = 3  # traces that fold something
_NESTED = 4  # least number of equal modules that are folded inside a folded module


class ModelCall(NamedTuple):
    """What ``profile`` was given; tensors may be real, fake or on the meta device.

    ``whole_paths`` grows: the modules that no other one could represent in earlier traces.
    """

    apply: Any
    buffers: Mapping[str, torch.Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss | None
    targets: Any
    whole_paths: set[str]

    @contextlib.contextmanager
    def without_data(self) -> Iterator[None]:
        """Return a context in which the model may run with tensors that have no data."""
        with emptied_caches(spec.cls for spec in self.apply.skeleton.specs), fake_tensors():
            yield

    def faked(self) -> tuple[tuple[Any, ...], dict[str, Any], Any, Any, Loss]:
        """Return arguments, keyword arguments, buffers, targets and the loss, without data."""
        args, kwargs, buffers, targets = map_tensors(
            _fake_like, (self.args, dict(self.kwargs), dict(self.buffers), self.targets)
        )
        return (
            args,
            kwargs,
            buffers,
            targets,
            functools.partial(_loss_of, self.loss, targets),
        )


def trace_model(
    call: ModelCall,
    plan: Plan,
    forms: Mapping[str, torch.Tensor],
    *,
    remat: Collection[str] = (),
    apart: Collection[str] = (),
    compiled: Collection[str] = (),
    fold: bool = True,
    accelerator: bool = True,
) -> Tape:
    """Return the tape of one forward, loss and backward.

    Arguments:
        call: the model and its inputs.
        plan: which leaves are trainable, and in which dtype modules compute.
        forms: the parameters, of which only shapes are read.
        remat: paths of modules that backward recomputes.
        apart: paths of modules of which each call has its own gradients.
        compiled: paths of modules that a compiler fuses.
        fold: whether one module represents others of its kind.
        accelerator: whether attention and dropout run as on a GPU.
    """
    # Note: fake tensors on the CPU behave like real ones, storages and their lifetimes included.
    with (
        call.without_data(),
        AcceleratorKernels() if accelerator else contextlib.nullcontext(),
    ):
        args, kwargs, buffers, targets, loss = call.faked()
        depth = 2 if fold else 0
        # Note: that a module can't be folded shows only when backward has run. Then the model is
        # traced again, with fewer folds.
        for attempt_index in itertools.count():
            model_tracer = _Tracer(
                call.apply, plan, forms, frozenset(remat), frozenset(apart), frozenset(compiled), depth,
                frozenset(call.whole_paths),
            )  # fmt: skip
            model_tracer.know(targets)
            try:
                return model_tracer.run(buffers, args, kwargs, loss)
            except CannotFoldError as error:
                depth = (
                    min(depth, 2 if error.paths else 1) if attempt_index < _ATTEMPTS else 0
                )
                call.whole_paths.update(error.paths)
        raise AssertionError("a trace that folds nothing raises no such error")


def leaf_dtypes(plan: Plan) -> dict[str, tuple[torch.dtype, bool]]:
    """Return the dtype in which each leaf is gathered, and whether it's trainable, by path."""
    return {
        leaf.path: leaf_form
        for unit in plan.unit_list
        for buffer in unit.buffers
        for leaf_form in [(unit.dtypes(buffer).computed, buffer.trainable)]
        for leaf in buffer.leaves
    }


def _forward(module: weakref.ref[nn.Module], /, *args: Any, **kwargs: Any) -> Any:
    call_module = module()
    assert call_module is not None, "a module lives while it runs"
    return type(call_module).forward(call_module, *args, **kwargs)


def _recomputed(
    module: weakref.ref[nn.Module], call: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    call_module = module()  # a checkpoint holds the module until backward

    def held(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert call_module is not None, "a module lives while it runs"
        return call(*args, **kwargs)

    # Why as trees: so does the runtime, and then a checkpoint around this one keeps the inputs too.
    return remat(held)(args, kwargs)


def _around(path: str) -> list[str]:
    return [*tree.upwards(path)][1:]


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor, inside of ``fake_tensors``."""
    return Form.of(tensor).empty().requires_grad_(tensor.requires_grad)


class _Tracer:
    def __init__(
        self,
        apply: Any,
        plan: Plan,
        forms: Mapping[str, torch.Tensor],
        remat: frozenset[str],
        apart: frozenset[str],
        compiled: frozenset[str],
        depth: int,
        whole: frozenset[str],
    ) -> None:
        self.apply = apply
        self.remat = remat
        self.apart = apart
        self.compiled = compiled
        self.skeleton = apply.skeleton
        self.plan = plan
        self.units = plan.units
        self.forms = forms
        self.recorder = Recorder(Frame("", None, 0))
        self.params: dict[str, torch.Tensor] = {}
        self.traced: dict[Hashable, list[Traced]] = {}  # by kind and inputs
        # Note: of a kind with such inputs, several modules may be traced, if they read attributes
        # that differ.
        self.never: set[Hashable] = set()  # kinds and inputs that are never folded
        self.fold_paths: list[str] = []
        self.ran: dict[str, int | None] = {}  # modules of a kind that ran: the fold of each
        self.stubbed: dict[
            Any, Traced
        ] = {}  # by path and inputs: the module that stood for one
        self.dtypes = leaf_dtypes(plan)
        self.modules: list[nn.Module] = []
        # The hook of the checkpoint in which a module of a kind ran last.
        self.checkpoint: weakref.ref[Any] | None = None
        self.paths = self.skeleton.paths()
        again_indices = {
            self.paths[path] for path in remat | compiled if path in self.paths
        }
        self.kinds, self.differing = kinds_of(self.skeleton, self._form_of, again_indices)
        if not depth:
            self.kinds = {}
        self.copied = frozenset(self.skeleton.copied_attributes)
        self.below = order_below(self.skeleton.specs)
        self.names = {index: path for path, index in self.paths.items()}
        self.making = False
        self.outside: set[str] = (
            set()
        )  # modules whose parameters code outside of them reads
        # Attributes that modules read which may represent others.
        self.reading: list[set[tuple[int, str]]] = []
        self.nested = depth > 1
        self.inside: dict[
            str, Counter[int]
        ] = {}  # by path of a folded module: the kinds inside it
        # Why not inside compiled modules: tensors that a module makes there live until they return.
        # Why not modules whose calls are apart, and those around them: their gradients come when a
        # call is over.
        nodes_around = {node_path for path in apart for node_path in tree.upwards(path)}
        # Why not around many recomputed modules: none of those could represent another one inside.
        again_counts = Counter(node_path for path in remat for node_path in _around(path))
        nodes_around.update(
            path for path, count in again_counts.items() if count >= _NESTED
        )
        for path, index in self.paths.items():
            if (
                path in nodes_around
                or compiled.intersection(_around(path))
                or apart.intersection(tree.upwards(path))
            ):
                self.kinds.pop(index, None)
        for path in whole:
            self._trace_whole(path)
        # By path of a list: storages of inputs with a gradient, of its modules that ran.
        self.list_inputs: defaultdict[str, set[int]] = defaultdict(set)
        self.anchor = torch.empty((), requires_grad=True, dtype=torch.float32, device="cpu")

    def _trace_whole(self, around: str) -> None:
        """Let no other module represent one, nor a few that are inside it."""
        if self.kinds.pop(self.paths[around], None) is None:
            return
        # Why: few modules inside one that is traced itself aren't worth a trace that may fail.
        counts = self._kinds_inside(around)
        for path, index in self.paths.items():
            if tree.is_under(path, around) and counts[self.kinds.get(index, -1)] < _NESTED:
                self.kinds.pop(index, None)

    def _watch_inputs(self, path: str, inputs: Iterable[torch.Tensor]) -> None:
        """Trace the last module of a list itself, if the modules of the list share an input."""
        around, _, name = path.rpartition(".")
        if self.recorder.phase == "backward" or not name.isdecimal():
            return
        storages = {
            self.recorder.number(tensor) for tensor in inputs if tensor.requires_grad
        }
        # Why: its backward runs first, so it makes the gradient to which all others add.
        if storages & self.list_inputs[around]:
            self._trace_whole([p for p in self.paths if p.rpartition(".")[0] == around][-1])
        self.list_inputs[around] |= storages

    def _form_of(self, name: str) -> Hashable:
        tensor = self.forms.get(name)
        if tensor is None:
            return None
        return tuple(tensor.shape), *self.dtypes.get(name, (tensor.dtype, None))

    def know(self, tensors: Any) -> None:
        """Note tensors whose memory the tape doesn't count."""
        for part in self.recorder.parts(tensors_in(tensors)):
            self.recorder.number(part, known=True)

    def run(
        self, buffers: dict[str, torch.Tensor], args: Any, kwargs: Any, loss: Loss
    ) -> Tape:
        recorder, apply = self.recorder, self.apply
        precision = self.plan.precision
        self.know((args, kwargs, self.anchor, buffers))
        with (
            recorder,
            saved_tensors_hooks(recorder.pack, lambda tensor: tensor),
            warnings.catch_warnings(),
        ):
            # Why: from torch 2.15 on, a selective checkpoint warns of hooks around it, even these.
            warnings.filterwarnings(
                "ignore", "A saved_tensors_hooks context", FutureWarning
            )
            modules = self._modules(apply.copies(buffers))
            args, kwargs = cast_inputs(precision, True, args, kwargs)
            out = apply.run(modules[0], args, kwargs)
            out = cast_outputs(precision, out[0] if apply.mutable else out)
            # Tensors of the call live on only where backward needs them, as in a real step.
            del modules
            self.modules = []
            with recorder.call(LOSS) as loss_frame:
                loss_value = [loss(out)]
            del out
            # Note: the first nodes of backward are those of the loss.
            recorder.frame = loss_frame  # where backward begins
            self._backward(loss_value)
        # Note: code outside of a folded module uses its parameters, so a stub can't stand for it.
        folded_paths = {*self.fold_paths, *(path for path, _ in self.stubbed)}
        if (
            wrong_paths := self.outside & folded_paths
        ):  # autograd adds a gradient from there
            raise CannotFoldError(wrong_paths)
        return fold_log(recorder.log, self.fold_paths)

    def _backward(self, loss: list[torch.Tensor]) -> None:
        """Run backward of the loss, which the list holds."""
        if not loss[0].requires_grad:
            raise ValueError(
                "the loss does not depend on a trainable parameter, so there is no backward to "
                "trace: return the model's outputs, or pass loss=, a function from the outputs to "
                "the loss"
            )
        if loss[0].numel() != 1:
            raise ValueError(
                f"the loss must be a scalar; found a tensor of shape {list(loss[0].shape)}: return "
                "its mean or its sum"
            )
        # Note: gradients are returned, not accumulated, because the runtime reduces them.
        self.recorder.phase = "backward"
        trained_params = [param for param in self.params.values() if param.requires_grad]
        param_grads = torch.autograd.grad(
            # Why pop: now only autograd holds the loss, as in a real step.
            loss.pop(),
            [*trained_params, self.anchor],
            allow_unused=True,
        )
        self.recorder.frame = self.recorder.root
        del param_grads

    def _modules(self, buffers: dict[str, torch.Tensor]) -> list[nn.Module]:
        """Return the modules of the call; each tells the recorder when it runs."""
        specs, skeleton = self.skeleton.specs, self.skeleton
        # Why weak: they live as long as their modules, which a checkpoint may hold.
        self.buffers = weakref.WeakValueDictionary(buffers)

        def known_fake(tensor: torch.Tensor) -> torch.Tensor:
            # Note: the tensors of attributes may be on any device, as on meta.
            fake_tensor = _fake_like(tensor)
            self.know(fake_tensor)
            return fake_tensor

        self.modules = skeleton.instantiate(
            dict.fromkeys(skeleton.parameters, self.anchor),
            buffers,
            training=self.apply.training,
            tensor_copy=known_fake,
        )
        for index, module in enumerate(self.modules):
            # Note: the table makes parameters when they are read, and tells the tracer of the
            # reads.
            module.__dict__["_parameters"] = self._table(index)
            if specs[index].cls.forward is not nn.Module.forward:
                path, module_state = self.names[index], module.__dict__
                # Why weak: a module that held itself would keep its buffers alive.
                module_forward = module_state.get("forward") or functools.partial(
                    _forward, weakref.ref(module)
                )
                module_call = functools.partial(self._call, index, path, module_forward)
                if path in self.remat:
                    module_call = functools.partial(
                        _recomputed, weakref.ref(module), module_call
                    )
                module_state["forward"] = module_call
        self._make(0)
        return self.modules

    def _table(self, index: int) -> Table:
        state = self.modules[index].__dict__
        watched = {key: state.pop(key) for key in self.differing.get(index, ())}
        names, note = (
            self.skeleton.specs[index].parameters,
            functools.partial(self._note, index),
        )
        return Table(names, self.recorder, self._param, watched, note)

    def _note(self, index: int, name: str | None) -> None:
        """Note that code reads an attribute of a module, or its parameters."""
        if name is not None:
            for reads in self.reading:
                reads.add((index, name))
            return
        if self.making:
            return
        # Note: code outside of a module that may be folded reads its parameters.
        for path in tree.upwards(self.names[index]):
            if self.paths.get(path) in self.kinds and not self.recorder.runs(path):
                self.outside.add(path)

    def _make(self, index: int) -> None:
        """Make the parameters of a module and those below it, except for modules of a kind."""
        module = self.modules[index]
        param_table: Any = module._parameters
        param_table.make()
        for child in self.skeleton.specs[index].children.values():
            # Note: those of a kind are made when one of them runs; a stub needs none.
            if child is not None and child not in self.kinds:
                self._make(child)
        if isinstance(module, nn.RNNBase):
            self.making = True
            # Note: the flat weights of an RNN point to its parameters, so reading them is no use.
            refresh_flat_weights(module)
            self.making = False

    def _param(self, name: str) -> torch.Tensor:
        if name not in self.params:
            form, (dtype, trainable) = self.forms[name], self.dtypes[name]
            # Note: a parameter is no memory of the step; the runtime's gathers count it.
            param = self.recorder.unseen(
                lambda: torch.empty(
                    tuple(form.shape), dtype=dtype, device="cpu", requires_grad=trainable
                )
            )
            self.recorder.watch_param(name, param)
            self.params[name] = param
        return self.params[name]

    def _call(
        self, index: int, path: str, forward: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run one module, or let a stub replace it."""
        recorder = self.recorder
        inputs = tensors_in((args, kwargs))
        run_module = functools.partial(self._run, path, forward, args, kwargs, inputs)
        fold_around = recorder.fold_around()
        input_forms = None
        if fold_around is None:
            self._watch_inputs(path, inputs)
        if index in self.kinds and (
            fold_around is None or self._nests(fold_around.path, index)
        ):
            input_forms = self._described(args, kwargs)
        if input_forms is None or self._hooked(index) or path in self.outside:
            return run_module()[0]
        # Why buffers too: autograd may keep these copies.
        inputs += self._buffers(index)
        in_backward, call_place = recorder.phase == "backward", (path, input_forms)
        # Note: in backward a checkpoint runs modules again. It expects a module to save as much as
        # before, so a module that ran is run, also if its first call was a part of another module.
        # Why not a second one: two folded modules in one checkpoint would share what it keeps.
        if (
            path in self.ran
            or (in_backward and call_place not in self.stubbed)
            or self._shares_checkpoint()
        ):
            return run_module(self.ran.get(path) if in_backward else None)[0]
        traced_key = (
            self.kinds[index],
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            self._hooks_are_own(),
            input_forms,
            fold_around is None,
        )
        traced_module = self.stubbed.get(call_place) or self._standing(
            index, self.traced.get(traced_key, ())
        )
        if traced_module is not None:
            self.stubbed[call_place] = traced_module
            return self._stub(index, path, traced_module, inputs)
        self.ran[path] = None
        self._make(index)
        if traced_key in self.never:
            return run_module()[0]
        # Note: the first module of its kind with such inputs runs, and becomes the fold of others.
        fold = len(self.fold_paths)
        self.fold_paths.append(path)
        self.ran[path] = fold
        log_begin, state_before = len(recorder.log), self._state(index, args, kwargs)
        self.reading.append(set())
        out, frame = run_module(fold)
        attribute_reads = self.reading.pop()
        recorder.watch_grads(frame, inputs, _new_tensors(out, inputs))
        call_result = None
        # Note: a stub repeats outputs only, so it can't stand for a module that changes more.
        if state_before == self._state(index, args, kwargs):
            call_result = self._traced(index, fold, out, inputs, log_begin, attribute_reads)
        if call_result is None:
            self.never.add(traced_key)
            self.ran[path] = frame.fold = None
        else:
            self.traced.setdefault(traced_key, []).append(call_result)
        return out

    def _buffers(self, index: int) -> list[torch.Tensor]:
        """Return the buffers of a module and those below it."""
        specs = [self.skeleton.specs[module_index] for module_index in self.below(index)]
        names = [
            name for spec in specs for name in spec.buffers.values() if name is not None
        ]
        return [self.buffers[name] for name in names]

    def _stub(
        self, index: int, path: str, traced: Traced, inputs: list[torch.Tensor]
    ) -> Any:
        recorder, below = self.recorder, self.below(index)
        for place, name, _ in traced.reads:
            self._note(below[place], name)
        with recorder.call(path) as frame:
            frame.fold, frame.stub = traced.fold, True
            recorder.emit(Enter(path, tuple(map(recorder.number, inputs))))
            outputs = Stub.apply(traced, recorder, self.anchor, *inputs)
            out = traced.build(outputs, inputs)
            recorder.emit(Exit(path, tuple(map(recorder.number, tensors_in(out)))))
        recorder.watch_grads(frame, inputs, outputs)
        return out

    def _standing(self, index: int, candidates: Iterable[Traced]) -> Traced | None:
        """Return the traced module whose attributes have the values that it read."""
        below, differing = self.below(index), self.differing
        for candidate in candidates:
            if all(
                differing.get(below[place], {}).get(name) == value
                for place, name, value in candidate.reads
            ):
                return candidate
        return None

    def _hooked(self, index: int) -> bool:
        """Return whether a module below another one got a hook during the call."""
        hook_tables = ("_forward_hooks", "_forward_pre_hooks")
        # Note: the modules of the call are gone in backward.
        return bool(self.modules) and any(
            self.modules[module_index].__dict__[name]
            for module_index in self.below(index)[1:]
            for name in hook_tables
        )

    def _state(self, index: int, args: Any, kwargs: Any) -> Any:
        """Return what a module may change besides its outputs, as a value."""
        module_state = [
            (key, value_of(value) if (module_index, key) in self.copied else id(value))
            for module_index in self.below(index)
            for module in [self.modules[module_index]]
            for key, value in (*module.__dict__.items(), *module._buffers.items())
        ]
        tensor_versions = [
            (storage_id(value), version(value))
            for value in tree.leaves((args, kwargs))
            if isinstance(value, torch.Tensor)
        ]
        return module_state, tensor_versions, self._described(args, kwargs)

    def _described(self, args: Any, kwargs: Any) -> Hashable | None:
        """Return all in a module's inputs that can change its operations, or ``None``."""
        inputs = (args, kwargs)
        input_values: list[Hashable] = []
        tensor_count = 0
        storage_places: dict[
            int, int
        ] = {}  # the place of each, which shows inputs that share memory
        for value in tree.leaves(inputs):
            if isinstance(value, torch.Tensor):
                storage = storage_id(value)
                # Note: a parameter as an input, or a tensor inside another object, can't be
                # described.
                if storage in self.recorder.params:
                    return None
                input_values.append(
                    (
                        Form.of(value),
                        storage_places.setdefault(storage, len(storage_places)),
                    )
                )
                tensor_count += 1
            else:
                input_values.append(value_of(value))
        # Note: tensors inside other objects aren't leaves of the tree, so no form describes them.
        # And a module may write to an object.
        if len(tensors_in(inputs)) != tensor_count or any(map(_is_opaque, input_values)):
            return None
        return tuple(tree.paths(inputs)), tuple(input_values)

    def _nests(self, around: str, index: int) -> bool:
        """Return whether a module may represent others inside one that does so too."""
        if not self.nested or not self._hooks_are_own():
            return False
        if around not in self.inside:
            self.inside[around] = self._kinds_inside(around)
        # Note: fewer modules than that, unlike experts, aren't worth the stubs.
        return self.inside[around][self.kinds[index]] >= _NESTED

    def _kinds_inside(self, around: str) -> Counter[int]:
        """Return how many modules of each kind are inside a module."""
        return Counter(
            self.kinds[index]
            for path, index in self.paths.items()
            if index in self.kinds and tree.is_under(path, around)
        )

    def _run(
        self,
        path: str,
        forward: Any,
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
        fold: int | None = None,
    ) -> tuple[Any, Frame]:
        recorder = self.recorder
        with recorder.call(path) as frame, self._watch_checkpoint() as is_held:
            frame.compiled = frame.compiled or path in self.compiled
            # Note: a checkpoint inside the module itself runs it again, as a part of its backward.
            in_own_backward = (
                frame.again and frame.parent is not None and frame.parent.path == path
            )
            if not in_own_backward:
                frame.fold = fold
            recorder.emit(Enter(path, tuple(map(recorder.number, inputs)), is_held))
            del inputs
            if path in self.compiled and not frame.again and self._hooks_are_own():
                forward = functools.partial(_in_region, Region(recorder), forward)
            try:
                with self._own_leaves(path, frame):
                    out = self._computed(path, forward, args, kwargs)
            except BaseException:
                if (
                    frame.again
                ):  # a checkpoint stops when it has computed all that backward needs
                    # Note: the exception is how torch's checkpoint stops early, so the module has
                    # ended.
                    recorder.emit(Exit(path, ()))
                raise
            recorder.emit(Exit(path, tuple(map(recorder.number, tensors_in(out)))))
        return out, frame

    def _computed(self, path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        unit = self.units.get(path)
        if unit is None or not path:
            return forward(*args, **kwargs)
        if unit.full_precision:
            dtypes = [buffer.model_dtype for buffer in unit.buffers]
            return run_in_full_precision(dtypes, forward, args, kwargs)
        # Note: casts make tensors, so they are traced where the runtime makes them.
        args, kwargs = cast_inputs(unit.precision, False, args, kwargs)
        return cast_outputs(unit.precision, forward(*args, **kwargs))

    @contextlib.contextmanager
    def _own_leaves(self, path: str, frame: Frame) -> Iterator[None]:
        """Give the parameters of one call of a module their own gradients."""
        if path not in self.apart or frame.again or not torch.is_grad_enabled():
            yield
            return
        param_places = [
            (self.modules[index]._parameters, key, name)
            for node_path, index in self.paths.items()
            if tree.is_under(node_path, path)
            for key, name in self.skeleton.specs[index].parameters.items()
            if name is not None
        ]
        # Note: like the runtime's gather of one call, whose backward gets the call's gradients
        # alone.
        values_before = [table[key] for table, key, _ in param_places]
        trained_params = {
            name: self._param(name) for _, _, name in param_places if self.dtypes[name][1]
        }
        own_params = Leaves.apply(
            self.recorder,
            frame.number,
            [*trained_params],
            self.anchor,
            *trained_params.values(),
        )
        own_leaves = dict(zip(trained_params, own_params, strict=True))
        del own_params
        for table, key, name in param_places:
            if name in own_leaves:
                table[key] = own_leaves[name]
        del own_leaves
        try:
            yield
        finally:
            for (table, key, _), param in zip(param_places, values_before, strict=True):
                table[key] = param

    @contextlib.contextmanager
    def _watch_checkpoint(self) -> Iterator[bool]:
        """See what a checkpoint keeps of a module; yield whether the module is the outermost."""
        outer_hooks, recorder = outer_saved_tensors_hooks(), self.recorder
        if outer_hooks is None or recorder.phase == "backward":
            yield False
            return
        pack_function = getattr(outer_hooks[0], "func", outer_hooks[0])
        is_region = isinstance(getattr(pack_function, "__self__", None), Region)
        if is_region or pack_function in (recorder.pack, recorder.pack_held):
            yield False
            return
        with saved_tensors_hooks(
            functools.partial(recorder.pack_held, outer_hooks[0]), outer_hooks[1]
        ):
            yield True

    def _shares_checkpoint(self) -> bool:
        """Return whether another module of a kind ran in the innermost checkpoint."""
        outer_hooks = outer_saved_tensors_hooks()
        checkpoint_before, self.checkpoint = self.checkpoint, None
        if outer_hooks is not None and not self._hooks_are_own():
            # Why weak: the hook holds the inputs of its checkpoint.
            self.checkpoint = weakref.ref(outer_hooks[0])
        # Note: two references are equal while they are to one hook.
        return self.checkpoint is not None and self.checkpoint == checkpoint_before

    def _hooks_are_own(self) -> bool:
        """Return whether no checkpoint hides from the recorder what autograd saves."""
        outer_hooks = outer_saved_tensors_hooks()
        return outer_hooks is None or outer_hooks[0] == self.recorder.pack

    def _traced(
        self,
        index: int,
        fold: int,
        out: Any,
        inputs: list[torch.Tensor],
        log_begin: int,
        reads: set[tuple[int, str]],
    ) -> Traced | None:
        """Return how a stub repeats a module that ran, or ``None`` if no stub can."""
        recorder, number = self.recorder, self.recorder.number
        values, build_tree = tree.flatten(out)
        outputs = _new_tensors(out, inputs)
        storages = [storage_id(tensor) for tensor in outputs]
        # Note: a stub's outputs have their own new storages.
        taken_storages = {*recorder.params, *map(storage_id, inputs)}
        is_fresh = len(set(storages)) == len(storages) and taken_storages.isdisjoint(
            storages
        )
        leaf_tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not is_fresh or len(leaf_tensors) != len(tensors_in(out)):
            return None
        # Note: each tensor of the result is a new one, or an input that the module passes on.
        tensor_places = {id(tensor): i for i, tensor in enumerate((*outputs, *inputs))}
        places = [tensor_places.get(id(value)) for value in values]
        plain_values = [None if isinstance(v, torch.Tensor) else v for v in values]
        if not all(map(is_plain, plain_values)):
            return None  # such as a cache

        def rebuilt(new_tensors: Sequence[Any], stub_inputs: Sequence[Any]) -> Any:
            tensors = (*new_tensors, *stub_inputs)
            pairs = zip(places, plain_values, strict=True)
            return build_tree(
                [value if place is None else tensors[place] for place, value in pairs]
            )

        if self._hooks_are_own():
            events = (event for _, _, event in recorder.log[log_begin:])
            saved_storages = {event.storage for event in events if isinstance(event, Save)}
        else:
            saved_storages = set(map(number, inputs))  # a checkpoint hides what it saves
        below_places = {module_index: i for i, module_index in enumerate(self.below(index))}
        own_reads = tuple(
            (below_places[module_index], name, self.differing[module_index][name])
            for module_index, name in reads
            if module_index in below_places
        )
        return Traced(
            fold=fold,
            outputs=tuple(map(Form.of, outputs)),
            build=rebuilt,
            kept_inputs=tuple(
                i for i, tensor in enumerate(inputs) if number(tensor) in saved_storages
            ),
            kept_outputs=tuple(
                i for i, tensor in enumerate(outputs) if number(tensor) in saved_storages
            ),
            reads=own_reads,
        )


def _new_tensors(out: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a module's result that aren't its inputs."""
    input_ids = set(map(id, inputs))
    return [tensor for tensor in tensors_in(out) if id(tensor) not in input_ids]


def _in_region(region: Region, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    with region:
        return forward(*args, **kwargs)


def _is_opaque(value: Any) -> bool:
    """Return whether a result of ``value_of`` has a tensor or an unknown object."""
    if not isinstance(value, tuple | frozenset):
        return False
    return bool({"tensor", "object"}.intersection(value)) or any(map(_is_opaque, value))


def _loss_of(loss: Loss | None, targets: Any, out: Any) -> torch.Tensor:
    """Return the loss of outputs; without a loss function the outputs themselves, or their sum."""
    if loss is not None:
        return loss(out) if targets is None else loss(out, targets)
    outputs = tensors_in(out)
    graded_outputs = [tensor for tensor in outputs if tensor.requires_grad]
    if transforms_active() and not graded_outputs:  # forward mode requires no gradient
        graded_outputs = [tensor for tensor in outputs if tensor.is_floating_point()]
    if not graded_outputs:
        raise ValueError(
            "the model's outputs require no gradient, so there is no backward to trace; pass "
            "trainable parameters"
        )
    if len(graded_outputs) == 1 and graded_outputs[0].dim() == 0:
        return graded_outputs[0]
    return torch.stack([output.sum() for output in graded_outputs]).sum()
