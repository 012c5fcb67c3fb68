"""Hold what all pages share: the value that a page is, what it is asked, what is shown, templates and plots.

No page lives here, and nothing knows the server: pages are made of values, and asked by functions.
"""
