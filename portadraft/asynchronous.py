"""Generating from asyncio: one worker thread runs the calls, one after another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_END = object()


class Worker:
    """A single thread, started when it is first needed.

    Work is a function of an event, which is set when nobody waits for the result any more. The
    work looks at it between steps and returns; the caller is told of its own cancellation
    only then, so that the model is free again.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._guard = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def _executor(self) -> ThreadPoolExecutor:
        with self._guard:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
            return self._pool

    async def run(self, work: Callable[[threading.Event], T]) -> T:
        """The result of the work, or its error."""
        cancelled = threading.Event()
        future = self._executor().submit(work, cancelled)
        done = asyncio.wrap_future(future)
        try:
            await asyncio.wait({done})
        except asyncio.CancelledError:
            cancelled.set()
            if not future.cancel():  # it runs: it ends after the step that it is in
                await asyncio.wait({done})
                if not done.cancelled():
                    done.exception()  # nobody else will look at it
            raise
        return done.result()

    async def iterate(self, work: Callable[[threading.Event], Iterator[T]]) -> AsyncGenerator[T, None]:
        """What an iterator of the work gives, made at the model's pace however slowly it is read.

        Return it as it is rather than from another generator that closes it: a loop that ends closes every generator
        that is still open, and the two would close this one at once.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Any] = asyncio.Queue()
        cancelled = threading.Event()

        def put(item: Any) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, item)
            except RuntimeError:  # the loop is closed: nobody reads
                cancelled.set()

        def produce() -> None:
            try:
                for item in work(cancelled):
                    put(item)
                put(_END)
            except BaseException as error:
                put(_Failure(error))

        future = self._executor().submit(produce)
        try:
            while (item := await queue.get()) is not _END:
                if isinstance(item, _Failure):
                    raise item.error
                yield item
        finally:
            cancelled.set()
            if not future.cancel():
                await asyncio.wait({asyncio.wrap_future(future)})


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error
