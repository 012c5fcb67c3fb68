"""Make pages of what the tools know: HTML by templates, plots as inline SVG from few numbers.

No page asks another address for anything, and nothing that comes from data is markup or runs: templates escape it, and
the policy of each page forbids scripts and requests.
"""
