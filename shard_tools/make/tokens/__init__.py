"""Turn documents into token ids: tokenizers, chat templates, splits, and ``tokenize``, which ``convert`` runs.

Reads no source format and writes no shard itself: records come from the sources of ``convert`` and go through its
``pack``. Tokenizer libraries are imported only when a file needs them.
"""

from shard_tools.make.tokens.run import TokenizeOptions, TokenizeReport, tokenize

__all__ = ["TokenizeOptions", "TokenizeReport", "tokenize"]
