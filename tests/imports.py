"""The imports of slow tests that take seconds, for the process that the ranks of ``run_ranks`` are forked from.

Without it each of the four processes of each pool would import them by itself.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx  # noqa: F401  # it imports what recordings of graphs need, too
    import transformers

    for name in ("BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"):
        getattr(transformers, name)
