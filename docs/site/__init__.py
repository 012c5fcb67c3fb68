"""Build the site: pages of this repository, pages made from its code, and one check of all that is built.

``python -m docs.site OUT`` (``make docs``) stages all pages in a temporary folder, laid out as in the repository, and
lets Sphinx build them. What a page would repeat from the code is made from the code: see ``MADE`` in ``stage``.
"""
