"""Awaiting handles and events in asyncio.

A handle's end is told by one of the library's threads, which must not need the interpreter's lock. So it pushes the
handle's key to a list and makes a descriptor readable; the loop, which watches the descriptor, does the rest.
"""

import asyncio
import os
from typing import TYPE_CHECKING, Any, Dict, Generator
from weakref import WeakKeyDictionary, ref

from ._kvxfer import Event, Handle, _Wakes

if TYPE_CHECKING:
    from ._kvxfer import Events


class _Bridge:
    """What one event loop waits for."""

    def __init__(self) -> None:
        self.wakes = _Wakes()
        self.waiting: Dict[int, "asyncio.Future[None]"] = {}
        self.last_key = 0

    def watch(self, handle: Handle, future: "asyncio.Future[None]") -> int:
        self.last_key += 1
        key = self.last_key
        self.waiting[key] = future
        try:
            self.wakes.watch(handle, key)
        except BaseException:
            del self.waiting[key]
            raise
        return key

    def forget(self, key: int) -> None:
        self.waiting.pop(key, None)
        self.wakes.forget(key)

    def on_ready(self) -> None:
        for key in self.wakes.take():
            future = self.waiting.get(key)
            if future is not None and not future.done():
                future.set_result(None)


# Weak on both sides: the futures that a bridge holds know their loop, so the loop must be all that keeps the bridge. It
# does, as the reader's callback.
_bridges: "WeakKeyDictionary[asyncio.AbstractEventLoop, ref[_Bridge]]" = WeakKeyDictionary()


def _bridge(loop: asyncio.AbstractEventLoop) -> _Bridge:
    known = _bridges.get(loop)
    bridge = None if known is None else known()
    if bridge is None:
        bridge = _Bridge()
        loop.add_reader(bridge.wakes.fileno(), bridge.on_ready)
        _bridges[loop] = ref(bridge)
    return bridge


async def ended(handle: Handle) -> Any:
    """The handle's result, or its error raised, once it has ended. Cancelling the wait does not touch the handle."""
    if not handle.done():
        loop = asyncio.get_running_loop()
        bridge = _bridge(loop)
        future: "asyncio.Future[None]" = loop.create_future()
        key = bridge.watch(handle, future)
        try:
            await future
        finally:
            bridge.forget(key)
    return handle.poll()


def _await(self: Handle) -> Generator[Any, None, Any]:
    """Waits in asyncio for the handle's end, and gives its result or raises its error."""
    return ended(self).__await__()


# Here rather than in Rust: no frame of the extension module lies between the loop and the coroutine.
_await.__name__, _await.__qualname__ = "__await__", "Handle.__await__"
Handle.__await__ = _await  # type: ignore[method-assign]


class EventIterator:
    """Events of an endpoint, as they come, until it is closed. Iterators of one endpoint share its queue: each event
    goes to one of them. None is taken ahead: leaving the loop leaves the rest in the queue."""

    def __init__(self, events: "Events") -> None:
        self._events = events

    def __aiter__(self) -> "EventIterator":
        return self

    async def __anext__(self) -> Event:
        while True:
            # In this order: what came before the end is not lost.
            closed = self._events._closed
            # One, with nothing awaited before it is given: a cancelled wait loses none.
            for event in self._events.drain(1):
                return event
            if closed:
                raise StopAsyncIteration
            await _readable(self._events)


async def _readable(events: "Events") -> None:
    """Waits until events are there or the endpoint is closed."""
    loop = asyncio.get_running_loop()
    future: "asyncio.Future[None]" = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    # Descriptors of our own: a loop has one reader per descriptor, and others may watch the endpoint's.
    signals = events._signals()
    try:
        for signal in signals:
            loop.add_reader(signal, wake)
        await future
    finally:
        for signal in signals:
            if not loop.is_closed():
                loop.remove_reader(signal)
            os.close(signal)
