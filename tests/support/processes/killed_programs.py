"""Programs that end by SIGKILL in the middle of what they write: after so many samples, or checkpoints."""

from __future__ import annotations


def stopping(work: str) -> str:
    """A program that does some work, and is killed before it writes more than ``argv[3]`` samples."""
    return f"""
import os, sys
import shard_tools.make.write.writer as writer
stop_at = int(sys.argv[3])
write, write_all = writer.ShardWriter.write, writer.UnmarkedWriter.write_all
state = [0]
def counted(self, sample):
    state[0] += 1
    if state[0] > stop_at:
        os.kill(os.getpid(), 9)
    write(self, sample)
def counted_all(self, samples):
    begun, taken = state[0], samples[: stop_at - state[0]]
    write_all(self, taken)
    state[0] = begun + len(taken)
    if len(taken) < len(samples):
        os.kill(os.getpid(), 9)
writer.ShardWriter.write, writer.UnmarkedWriter.write_all = counted, counted_all
{work}
"""


def killed_at_checkpoint(number: int, program: str) -> str:
    """A program that is killed when it is about to give its checkpoint of that number, from 1, the name of a whole one.

    The one before is what it goes on from.
    """
    return f"""
import os, sys
num_saved = [0]
def notice(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("checkpoint.pt"):
        num_saved[0] += 1
        if num_saved[0] == {number}:
            os.kill(os.getpid(), 9)
sys.addaudithook(notice)
{program}
"""
