"""Read the files of ``loader.trace``, join those of several ranks, and report where the time went. Records nothing."""

from shard_tools.look.trace.merge import MergeReport, merge_traces

__all__ = ["MergeReport", "merge_traces"]
