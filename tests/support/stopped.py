"""Programs that end by SIGKILL after so many samples, in the middle of what they write."""

from __future__ import annotations


def stopping(work: str) -> str:
    """A program that does some work, and is killed before it writes more than ``argv[3]`` samples."""
    return f"""
import os, sys
import shard_tools.write.writer as writer
stop_at = int(sys.argv[3])
write = writer.ShardWriter.write
def counted(self, sample, state=[0]):
    state[0] += 1
    if state[0] > stop_at:
        os.kill(os.getpid(), 9)
    write(self, sample)
writer.ShardWriter.write = counted
{work}
"""
