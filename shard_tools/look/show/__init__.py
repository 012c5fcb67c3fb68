"""Make pages from what the tools know: HTML by templates, plots as inline SVG from few numbers.

Pages request nothing from other addresses, and data never becomes markup or code: templates escape it, and each page's
policy forbids scripts and requests.
"""
