"""The site, from the same texts that a code host shows: ``python -m scripts.website``.

``tree`` writes Sphinx's source folder from the course. ``links`` rewrites the links of the pages.
``exercises`` makes a page per exercise from the guidelines, ``labs`` an index of labs.
``reference`` makes a reference from the toolkit's docstrings and command lines, ``gallery`` a page
of all images. ``conf`` is Sphinx's configuration.

Why Sphinx with MyST and Furo: MyST reads CommonMark, the language that a code host reads. So one
text serves both, folded answers included. Search, fonts and scripts are files beside the pages. So
the site works without a network, also when its files are opened without a server.
"""
