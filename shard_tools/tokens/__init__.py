"""Turn documents into token ids: tokenizers, chat templates, splits, and ``tokenize``, which ``convert`` runs.

Reads no layout and writes no shard itself: records come from ``convert``'s sources and go through its ``pack``. Each
tokenizer library is imported when a file asks for it, never before.
"""

from shard_tools.tokens.run import TokenizeOptions, TokenizeReport, tokenize

__all__ = ["TokenizeOptions", "TokenizeReport", "tokenize"]
