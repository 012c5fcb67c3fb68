"""Ray's worker processes, forked from one that has imported what they need; not a test itself.

A worker is an interpreter that imports Ray, torch and us: five seconds of a core, and the tests of Ray start thirty.
``TwoNodes`` has Ray start this file in place of its own ``setup_worker.py``: it hands its arguments, variables and
output to the process that forks, and ends. As ``ray_worker.py serve SOCKET`` it is that process, itself forked by
``forked.py``, until it is killed; its workers end with it. What a worker does from then on is Ray's
``default_worker.py``, as ever.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET = "SHARDSTREAM_RAY_WORKERS"
"""The variable with the path of the socket."""
_PR_SET_PDEATHSIG = 1
_IMPORTS = (
    "torch.distributed", "pandas", "pyarrow.dataset", "aiohttp", "requests", "streaming.loader",
    "streaming.sets.datasets.dataset", "streaming.others.remote.reader", "shard_tools.make.convert",
    "shard_tools.running.ray_engine",
)  # fmt: skip
"""Not Ray, which reads its variables when it is imported: a worker's are its own."""


def hand_over() -> None:
    """Ask for a worker, as Ray has asked us to be one."""
    job = {"arguments": sys.argv[1:], "environ": dict(os.environ), "cwd": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [json.dumps(job).encode()], [1, 2])


def serve(path: str) -> None:
    """Fork a worker for each that connects; those that come while this imports are kept waiting."""
    import gc  # noqa: PLC0415  what hands over is to start fast: so everywhere in here
    import signal  # noqa: PLC0415
    from importlib import import_module  # noqa: PLC0415

    from tests.support.processes.forked import check_that_nothing_runs_beside  # noqa: PLC0415

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(128)
        gc.disable()  # as in forked.py
        for name in _IMPORTS:
            import_module(name)
        check_that_nothing_runs_beside()
        assert "ray" not in sys.modules
        os.write(1, b"ready\n")
        gc.collect()
        gc.freeze()
        gc.enable()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here asks how they ended
        while True:
            with listener.accept()[0] as connection:
                data, files, _, _ = socket.recv_fds(connection, 1 << 20, 2)
            if os.fork() == 0:
                listener.close()
                become(json.loads(data), files)
            for file in files:
                os.close(file)


def become(job: dict[str, object], files: list[int]) -> None:
    """Be a worker of Ray, as its ``setup_worker.py`` would have started it. Never returns."""
    import ctypes  # noqa: PLC0415
    import runpy  # noqa: PLC0415
    import signal  # noqa: PLC0415
    import traceback  # noqa: PLC0415

    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(job["environ"])
        os.chdir(job["cwd"])
        from ray._private.runtime_env.context import RuntimeEnvContext  # noqa: PLC0415  with its own variables
        from ray._private.utils import update_envs  # noqa: PLC0415
        from ray._private.workers.setup_worker import parser  # noqa: PLC0415

        given, arguments = parser.parse_known_args(job["arguments"])
        update_envs(RuntimeEnvContext.deserialize(given.serialized_runtime_env_context or "{}").env_vars)
        sys.argv = [word for word in arguments if word not in {"-s", "-S"}]  # of an interpreter that starts
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit:  # so they end
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        hand_over()
