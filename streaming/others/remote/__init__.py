"""Read in Ray actors: ``DataLoader(…, remote_group=…)`` yields handles, and the process that uses a batch fetches it.

Every actor runs the ordinary loader of its ranks; nothing here plans, fetches or decodes.
"""

from streaming.others.remote.handles import BatchHandle, RemoteBatch
from streaming.others.remote.loop import RemoteLoop, open_remote

__all__ = ["BatchHandle", "RemoteBatch", "RemoteLoop", "open_remote"]
