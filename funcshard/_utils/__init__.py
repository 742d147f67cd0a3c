"""Helpers that all wings use. None of them knows about sharding; skip them in a first reading.

- ``tree``: pytrees, dotted paths, and tree structures as plain data. The only file that knows
  optree.
- ``stored_trees``: check a structure that a file gives, and find the classes that it names.
- ``regular_files``: open files, and no pipes. ``file_data``: check the data that they hold.
  ``codec``: data classes as JSON and back, by their type hints.
- ``cutting``: cut the parts of units out of such a structure.
- ``table``: tables as text and as HTML, and objects that show themselves as such.
- ``donation``: makes the old tensors raise after a step has updated them in place.
- ``tensors``: dtypes by name; find, map and cast the tensors in any Python structure.
- ``options``: check the numbers, counts and flags that users pass, and advise on habits of other
  libraries.
- ``compiled_outside``: a warning where ``torch.compile`` has no effect.
- ``closures``: walk the objects that a function or a value refers to.
- ``pages``: memory for disks in pages of 2 MiB, and pages of files that need not stay in memory.
- ``garbage``: make many objects without searches for garbage between.
- ``random_state``: save and restore the state of the random number generators.
- ``torch_names``: looks up private names of torch, which a release may lack.
- ``torch_private``: uses of torch's private API. ``torch_operators``: names, arguments and effects
  of its operators. ``torch_compilers``: its compilers. ``torch_kernels``: a fused kernel,
  and late copies of large tensors. ``torch_symbols``: graphs for any size.
  ``torch_modules``: names in state dicts, parametrized modules. ``torch_groups``: process groups.
  No other file touches that API.
"""

from __future__ import annotations

from funcshard._utils import file_data, table, tree
from funcshard._utils.closures import captured, reachable
from funcshard._utils.codec import decode, encode
from funcshard._utils.compiled_outside import Warned, untraced_with_warning
from funcshard._utils.cutting import cutter
from funcshard._utils.donation import DONATED_STATE, check_not_donated, donate, is_donated
from funcshard._utils.garbage import without_collection
from funcshard._utils.options import (
    absent,
    check_bytes,
    check_choice,
    check_count,
    check_device,
    check_flag,
    check_number,
    check_path,
    did_you_mean,
    is_tree_of_shards,
    module_remedy,
    outline,
)
from funcshard._utils.pages import io_memory, release_pages
from funcshard._utils.random_state import RandomState
from funcshard._utils.regular_files import open_regular, read_regular, regular_size
from funcshard._utils.stored_trees import check_structure, loaded_class, public_class_name
from funcshard._utils.table import Bullets, Part, Shown, Table
from funcshard._utils.tensors import (
    byte_memory,
    byte_view,
    cast_tree,
    check_plain,
    dtype_name,
    dtype_of,
    has_numbers,
    is_dtensor,
    map_tensors,
    tensors_in,
)
from funcshard._utils.torch_compilers import Boxed, compile_with, find_backend, inductor
from funcshard._utils.torch_groups import (
    abort_group,
    default_store,
    destroy_group,
    group_timeout,
    has_ended,
    new_group,
    reconnected,
    store_for_thread,
    store_is_gone,
)
from funcshard._utils.torch_kernels import LARGE, has_unscale_kernel, late_copy, unscale_in_place
from funcshard._utils.torch_modules import class_for_calls, forget_parametrized, state_names
from funcshard._utils.torch_operators import (
    argument_names,
    count_flops,
    is_random,
    list_arguments,
    moved_bytes,
    operator_arguments,
    operator_by_name,
    operator_full_name,
    operator_name,
    writes_inputs,
    written_arguments,
)
from funcshard._utils.torch_private import (
    BasisLoop,
    TorchDispatchMode,
    ValueReadError,
    address,
    asks_for_data,
    basis_loops,
    belongs_to_transform_above,
    callers_level,
    cast_of,
    check_thread,
    cuda_sleep,
    dispatch_modes,
    fake_tensors,
    graph_task_id,
    hide_from_selective_checkpoints,
    in_selective_checkpoint,
    is_compiled_in_place,
    is_fake,
    is_legacy_batched,
    is_transformed,
    is_zero_tensor,
    local_part,
    next_sequence_number,
    no_torch_function,
    one_forward_level,
    outer_saved_tensors_hooks,
    record_graph,
    recording_graph,
    recording_or_transforming,
    recording_tensors,
    refresh_flat_weights,
    running_sequence_number,
    runs_in_backward,
    saved_tensors_hooks_allowed,
    sequence_number,
    signed,
    storage_id,
    stored_parts,
    transform_level,
    transforms_active,
    unseen,
    untraced,
    unwrapped,
    unwrapped_bytes,
    version,
    wrapper_subclass,
)
from funcshard._utils.torch_symbols import put_number, record_sized_graph
