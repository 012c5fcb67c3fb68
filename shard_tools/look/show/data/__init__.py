"""Make the pages of the data: samples, columns, one sample, bad samples, and the bytes of values.

Sample data is only displayed: decoding is bounded and done by workers that may be killed. Nothing here knows the order
of training, and nothing is written.
"""
