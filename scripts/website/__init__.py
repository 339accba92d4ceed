"""The site, from the same texts that a code host shows: ``python -m scripts.website``.

``tree`` writes Sphinx's source folder from the course: pages are copied with their links rewritten
(``links``), guidelines become a page per exercise (``exercises``), the toolkit's docstrings and
command lines a reference (``reference``), all images a page of pictures (``gallery``). ``conf``
is Sphinx's configuration.

Why Sphinx with MyST and Furo: MyST reads CommonMark, the language that a code host reads, so that
one text serves both, folded answers included; and search, fonts and scripts are files beside the
pages, so that the site works without a network, also when its files are opened without a server.
"""
