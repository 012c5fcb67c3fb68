"""``DataLoader(…, remote_group=…)``: Ray actors read, the loop sees handles, whoever uses a batch fetches it."""

from streaming.remote.group import RemoteGroup
from streaming.remote.handles import BatchHandle, RemoteBatch
from streaming.remote.loop import RemoteLoop, open_remote

__all__ = ["BatchHandle", "RemoteBatch", "RemoteGroup", "RemoteLoop", "open_remote"]
