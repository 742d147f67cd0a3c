"""Helpers that all wings use; you can skip them at first.

- ``tree``: pytrees, dotted paths, structures as data, and the tensors in any structure. Only
  ``tree`` knows optree.
- ``regular_files``, ``file_data``, ``codec``: files and their data, checked, and data classes as
  JSON.
- ``table``: tables as text and as HTML.
- ``tensors``: dtypes by name, bytes and classes of tensors.
- ``options``: check options, and advise on habits of other libraries.
- ``closures``: the objects that a function or a value refers to.
- ``process_state``: the random number generators, and code without searches for garbage.
- ``torch_private``, ``torch_operators``, ``torch_compilers``, ``torch_fakes``, ``torch_symbols``,
  ``torch_modules``, ``torch_groups``: torch's private API, which no other file touches.
"""
