"""The prefill process of another machine, a module to run: ``remote_worker HOST:PORT``.

The secret is read from ``LLMOPT_PREFILL_KEY``. Reports to the decode process, and again when it is gone, until that one
says that it is done.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

from llmopt_plugins.scheduling.pd_separation.options import parse_address
from llmopt_plugins.scheduling.pd_separation.protocol import Setup
from llmopt_plugins.scheduling.pd_separation.remote import sender, shared_key
from llmopt_plugins.scheduling.pd_separation.worker import build_worker, serve

if TYPE_CHECKING:
    from llmopt.pipeline import InferencePipeline

_TIMEOUT_S = 60.0  # of a transfer


def work(host: str, port: int, source: str | None) -> None:
    """Serve one connection.

    :param source: where the model lies on this machine; None: where the decode process says.
    :raises OSError: nobody is there, or not any more.
    """
    connection = socket.create_connection((host, port), timeout=10.0)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel: Any = Connection(connection.detach())
    key = shared_key()
    answer_challenge(channel, key)
    deliver_challenge(channel, key)

    def make(setup: Setup) -> tuple[InferencePipeline, Callable[[list[int]], None]]:
        pipe = build_worker(replace(setup, source=source or setup.source), None)
        return pipe, sender(host, setup, pipe.kv_cache, _TIMEOUT_S)

    with channel:
        serve(channel, make)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="host:port at which the decode process listens")
    parser.add_argument("--source", help="folder, file or name of the model on this machine")
    parser.add_argument("--once", action="store_true", help="end when the decode process is gone")
    options = parser.parse_args()
    host, port = parse_address(options.address)
    while True:
        try:
            work(host, port, options.source)
            return
        except (OSError, EOFError) as error:
            if options.once:
                raise SystemExit(f"the decode process at {options.address} is gone: {error}") from None
            time.sleep(2.0)


if __name__ == "__main__":
    main()
