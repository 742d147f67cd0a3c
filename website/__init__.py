"""The documentation's site, in reading order.

- ``reference``: a page for each public name.
- ``docstrings``: docstrings as Markdown.
- ``notebooks``: notebooks as pages.
- ``figures``: the figures, as SVG.
- ``hooks``: mkdocs calls these while it builds the site.
"""
