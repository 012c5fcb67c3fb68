"""Hold what all pages share: page and query values, the subject, templates and plots.

No page lives here, and nothing knows the server: pages are values with functions that answer queries.
"""
