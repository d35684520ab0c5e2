"""Workers on other machines: the same messages over TCP, and KV over torch.distributed.

A worker has a pool of its own with the same block ids. After each chunk it sends the blocks that the chunk wrote to,
the keys and values of one layer after the other, straight into the pool of the decode process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from llmopt.errors import PluginUnavailableError
from llmopt_plugins.scheduling.pd_separation.options import parse_address
from llmopt_plugins.scheduling.pd_separation.protocol import Setup

if TYPE_CHECKING:
    from llmopt.kv_cache import KVCache

KEY_VARIABLE = "LLMOPT_PREFILL_KEY"
_RECEIVER, _SENDER = 0, 1


def shared_key() -> bytes:
    """The secret that both sides know. Messages are pickled, so whoever knows it may run code here.

    :raises PluginUnavailableError: it is not set.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise PluginUnavailableError(
            f"prefill over the network needs a secret that both sides know. Set {KEY_VARIABLE} to the same text for "
            "this process and for the workers."
        )
    return key.encode()


class RemoteHub:
    """Where workers report.

    :param address: ``host:port`` to listen at.
    :param kv_cache: the pool that KV is received into.
    :param timeout_s: of a transfer.
    """

    def __init__(self, address: str, kv_cache: KVCache, timeout_s: float) -> None:
        self.key = shared_key()
        self.kv_cache, self.timeout_s = kv_cache, timeout_s
        host, port = parse_address(address)
        self._server = socket.create_server((host, port))
        self._server.settimeout(0.5)
        self._store = TCPStore(
            host, 0, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self._lock = threading.Lock()
        self._number = 0
        self._is_closed = False

    @property
    def port(self) -> int:
        """At which workers report."""
        return int(self._server.getsockname()[1])

    def accept(self) -> RemoteProcess:
        """Wait for the next worker that knows the secret.

        :raises OSError: the hub was closed.
        """
        while not self._is_closed:
            try:
                accepted, _ = self._server.accept()
            except TimeoutError:
                continue
            accepted.settimeout(None)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel: Any = Connection(accepted.detach())
            try:
                deliver_challenge(channel, self.key)
                answer_challenge(channel, self.key)
            except Exception:  # somebody else
                channel.close()
                continue
            with self._lock:
                self._number += 1
                name = f"worker-{self._number}"
            return RemoteProcess(channel, self, name)
        raise OSError("the hub was closed")

    def group(self, name: str) -> Any:
        """The receiving end of a worker's transfers."""
        return dist.ProcessGroupGloo(PrefixStore(name, self._store), _RECEIVER, 2, timedelta(seconds=self.timeout_s))

    @property
    def store_port(self) -> int:
        """Where the two ends of a group find each other."""
        return int(self._store.port)

    def close(self) -> None:
        """Accept no more workers."""
        self._is_closed = True
        self._server.close()


class RemoteProcess:
    """A worker of another machine, as its keeper sees it."""

    def __init__(self, channel: Any, hub: RemoteHub, name: str) -> None:
        self.channel, self.hub, self.name = channel, hub, name
        self.pid: int | None = None
        self.receive: Callable[[list[int]], None] | None = self._receive
        self._group: Any = None

    def complete(self, setup: Setup) -> Setup:
        return replace(setup, transfer=(self.hub.store_port, self.name))

    def _receive(self, blocks: list[int]) -> None:
        """Write the KV of blocks to the pool, layer by layer."""
        if self._group is None:
            self._group = self.hub.group(self.name)
        index = torch.tensor(blocks)
        with torch.inference_mode(False):
            for layer in self.hub.kv_cache.layers.values():
                for pool in (layer.key, layer.value):
                    part = torch.empty((len(blocks), *pool.shape[1:]), dtype=pool.dtype)
                    self._group.recv([part.view(torch.uint8)], _SENDER, 0).wait()
                    pool[index] = part

    def kill(self) -> None:
        """Let go of it: it cannot write to this pool, and ends its work when the connection is gone."""
        with contextlib.suppress(OSError):
            self.channel.close()
        self._group = None


def sender(host: str, setup: Setup, kv_cache: KVCache, timeout_s: float) -> Callable[[list[int]], None]:
    """What sends blocks of a worker's pool to the decode process, layer by layer."""
    assert setup.transfer is not None
    port, name = setup.transfer
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    groups: list[Any] = []

    def send(blocks: list[int]) -> None:
        if not groups:  # both ends meet at the first transfer
            groups.append(dist.ProcessGroupGloo(PrefixStore(name, store), _SENDER, 2, timeout))
        index = torch.tensor(blocks)
        for layer in kv_cache.layers.values():
            for pool in (layer.key, layer.value):
                groups[0].send([pool[index].view(torch.uint8)], _RECEIVER, 0).wait()

    return send
