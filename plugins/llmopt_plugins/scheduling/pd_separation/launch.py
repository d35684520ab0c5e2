"""Starting a worker on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from llmopt_plugins.scheduling.pd_separation.cpu_split import Share
from llmopt_plugins.scheduling.pd_separation.protocol import Setup


class LocalProcess:
    """A worker in a process of its own: a fresh interpreter, so nothing of this one's state or threads is in it."""

    def __init__(self, share: Share, memory: int) -> None:
        """:param memory: descriptor of the memory file of the pool."""
        mine, its = socket.socketpair()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OMP_NUM_THREADS": str(share.num_threads),
            "LLMOPT_NUM_THREADS": str(share.num_threads),
            "TQDM_DISABLE": "1",
        }
        with its:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "import sys; from llmopt_plugins.scheduling.pd_separation.worker import main; main(sys.argv[1:])",
                    str(its.fileno()),
                    str(memory),
                    ",".join(map(str, share.cpus)),
                ],
                env=environment,
                pass_fds=(its.fileno(), memory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for the decode process, which ends the worker
            )
        self.channel: Any = Connection(mine.detach())
        self.pid: int | None = self._process.pid
        self.receive: Callable[[list[int]], None] | None = None

    def complete(self, setup: Setup) -> Setup:
        return setup

    def kill(self) -> None:
        """End the process, and wait until it has."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self.channel.close()
