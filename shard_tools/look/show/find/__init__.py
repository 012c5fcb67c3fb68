"""Find samples: by place, key, condition or text, in the order of a column, or drawn at random; and give their keys.

All work is bounded in time and memory, and continues at the next request. Nothing here shows a sample; ``show.data``
does.
"""
