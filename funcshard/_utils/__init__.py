"""Helpers that all wings use. None of them knows about sharding; you can skip them at first.

- ``tree``: pytrees, dotted paths, and tree structures as plain data. Only this file knows optree.
- ``stored_trees``: check a structure from a file, and find the classes that it names.
- ``regular_files``: open files, and no pipes. ``file_data``: check the data that they hold.
  ``codec``: data classes as JSON and back, by their type hints.
- ``cutting``: cut the parts of units out of such a structure.
- ``table``: tables as text and as HTML, and objects that show themselves as such.
- ``donation``: makes the old tensors raise after a step has updated them in place.
- ``tensors``: dtypes by name; find, map and cast the tensors in any Python structure.
- ``options``: check options, and advise on habits of other libraries.
- ``compiled_outside``: a warning where ``torch.compile`` has no effect.
- ``closures``: walk the objects that a function or a value refers to.
- ``pages``: memory for disks in pages of 2 MiB, and pages of files that need not stay in memory.
- ``garbage``: make many objects without searches for garbage between.
- ``random_state``: save and restore the state of the random number generators.
- ``torch_names``: looks up private names of torch, which a release may lack.
- ``torch_private``: uses of torch's private API. ``torch_operators``: its operators.
  ``torch_compilers``: its compilers. ``torch_kernels``: a fused kernel, and late copies.
  ``torch_symbols``: graphs for any size. ``torch_modules``: state dicts, parametrized modules.
  ``torch_groups``: process groups. No other file touches that API.
"""
