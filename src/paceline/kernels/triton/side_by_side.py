"""Compiling kernels of many kinds at once."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextvars import copy_context
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from triton import AsyncCompileMode


class _CompileOnly(AsyncCompileMode):  # type: ignore[misc]
    """Kernels that are not compiled yet will be; their launches do nothing.

    Triton itself waits for a kernel before it launches it, so that of jobs that begin alike all would wait for the same
    one, and then for the next.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor, ignore_errors=True)
        self._lock = Lock()

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        def compile_all() -> Any:
            kernel = compile_fn()
            _ = kernel.run  # made when it is first read: a launcher, compiled from C
            return kernel

        with self._lock:
            super().submit(key, compile_all, finalize_fn)
        return SimpleNamespace(
            launch_metadata=lambda *_: None, run=lambda *_: None, function=None, packed_metadata=None
        )


def side_by_side(jobs: Sequence[Callable[[], Any]]) -> Iterator[float]:
    """Does jobs that launch kernels in threads of their own; yields the share that is done, up to 1.

    Each job is done twice: first to see which kernels it needs, which are then compiled, each of them once, and then
    again. The first time, what kernels would have written is not there: nothing may take it for an index.
    Results are dropped, and errors raised: what does not compile, by the job that launches it.
    """

    @torch.inference_mode()
    def run(job: Callable[[], Any]) -> None:
        job()

    def do_all(workers: Executor) -> None:
        context = copy_context()  # by which threads know of the mode
        for _ in workers.map(lambda job: context.copy().run(run, job), jobs):
            pass

    count = max(2, os.cpu_count() or 1)
    with ThreadPoolExecutor(count) as compilers, ThreadPoolExecutor(count) as workers:
        with _CompileOnly(compilers) as mode:
            do_all(workers)
            for done, _ in enumerate(as_completed(mode.raw_futures)):
                yield (done + 1) / (len(mode.raw_futures) + 1)
        do_all(workers)
    yield 1.0
