"""docs/dev/upstream.md lists every upstream test, and the tests of this library that it names exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "dev" / "upstream.md").read_text()

UPSTREAM = {
    "test_fsdp_core.py": """
        test_nested_wrapped_model test_nested_wrapped_model_single_iteration_mixed_precision test_nested_always_wrap_model
        test_transformer test_delayed_optim_step test_delayed_reduce_scatter test_mixture_of_experts
        test_mixture_of_experts_with_delay_before_free test_param_change_after_init test_pre_backward_hook_registration
        test_pre_backward_hook_registration_after_state_dict test_register_functions_called test_transformer_no_grad
        test_unshard_params_as_tensors
    """,
    "test_fsdp_backward_prefetch.py": "test_backward_prefetch",
    "test_wrap.py": """
        test_error_already_wrapped test_wrap_batchnorm_individually test_bn_always_wrapped_individually test_main_wrap_api
        test_wrap test_wrap_disabled_outside_context test_wrap_override_defaults test_always_wrap
        test_transformer_auto_wrap_policy test_module_wrap_policy test_module_wrap_policy_callable test_custom_policy
        test_auto_wrap_api test_auto_wrap_preset_exclude_wrap test_auto_wrap_preset_exclude_wrap_include_children
        test_auto_wrap_preset_force_leaf test_auto_wrap_preset_force_leaf_custom test_auto_wrap_smoke_test
        test_auto_wrap_with_ignored_modules test_frozen_params test_validate_frozen_params
    """,
    "test_fsdp_mixed_precision.py": """
        test_mixed_precision_no_reshard_after_forward test_mixed_precision_e2e_full_shard test_mp_embedding_reduce
        test_mp_embedding_only_params_and_bufs test_mp_embedding_default test_mp_embedding_params_and_reduce_diff
        test_mixed_precision_resnet test_grads_reduced_precision test_mp_batchnorm test_eval_root_cast_inputs
        test_full_precision_in_eval test_full_precision_in_eval_buffers test_full_precision_in_eval_comm
        test_input_grads_with_param_mixed_precision test_mixed_precision_with_ignored_module
        test_float16_on_one_submodule test_float16_on_one_submodule_skip_inputs
        test_float16_on_one_submodule_skip_inputs_error test_submodules_with_different_precisions_error
        test_submodules_with_different_precisions test_submodules_with_external_inputs test_train_ema_eval_flow
    """,
    "test_dynamo_distributed.py": """
        test_fsdp_aot_eager test_fsdp_setattr test_fsdp_unspecialized_forced_getattr_no_inline
        test_fsdp_unspecialized_forced_getattr_inline test_fsdp_inductor test_fsdp_activation_checkpointing test_hf_bert_fsdp
        test_hf_bert_fsdp_activation_checkpointing test_fsdp_orig_params_assert test_fsdp_skip_guards
        test_fsdp_skip_register_attr_or_module test_fsdp_dup_tensors_same_source test_fsdp_dup_tensors_diff_source
        test_fsdp_staticmethod
        test_hf_bert_ddp_inductor test_hf_bert_ddp_aot_eager test_issue90375 test_call_method_forward
        test_ddp_baseline_aot_eager_multiprocess test_ddp_activation_checkpointing test_higher_order_op
        test_compiler_collectives_automatic_dynamic_tensor
        test_compiler_collectives_automatic_dynamic_scalar
        test_compiler_collectives_automatic_dynamic_speculation_divergence
        test_compiler_collectives_dim_mismatch test_compiler_collectives_type_mismatch test_guard_collective
        test_asymmetric_compilation test_graph_split test_graph_split_ctx_manager test_no_split
        test_aot_autograd test_custom_layer test_ignored_parameters
    """,
}


def rows_of(page):
    """Return ``{upstream file: [(upstream test, text of the second column)]}``."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    row = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)
    return {section.split()[0]: row.findall(section) for section in sections}


ROWS = rows_of(PAGE)
NAMED = sorted(set(re.findall(r"`((?:\w+/)*test_\w+\.py)::(\w+)`", PAGE)))


def names_in(file):
    """Return the names of the tests of a file, without running the file."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", UPSTREAM)
def test_each_upstream_test_has_one_row(file):
    assert [name for name, _ in ROWS[file]] == UPSTREAM[file].split()


def test_a_row_names_a_test_or_is_open_with_what_is_missing():
    beside = {name: text for rows in ROWS.values() for name, text in rows}
    assert [name for name, text in beside.items() if "::" not in text and "**open**: " not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_test_that_a_row_names_exists(file, name):
    assert name in names_in(ROOT / "tests" / file)


def test_a_row_is_read_with_its_name_and_what_stands_beside():
    page = "## a.py\n\n| upstream | here |\n|---|---|\n| `test_x` | `test_y.py::test_z`; **open**: w |\n"
    assert rows_of(page) == {"a.py": [("test_x", "`test_y.py::test_z`; **open**: w")]}
