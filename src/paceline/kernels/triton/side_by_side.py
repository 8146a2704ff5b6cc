"""Compiling kernels of many kinds at once."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import torch
from triton import AsyncCompileMode


def side_by_side(jobs: Sequence[Callable[[], Any]]) -> Iterator[None]:
    """Does jobs that launch kernels in threads of their own, and gives a sign for each that is done, in order.

    A kernel that several of them need is compiled once. Results are dropped, and errors raised: what does
    not compile, by the job that launches it.
    """

    @torch.inference_mode()
    def run(job: Callable[[], Any]) -> None:
        job()

    workers = max(2, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as compilers, AsyncCompileMode(compilers, ignore_errors=True):
        context = copy_context()  # by which threads know of the mode
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(lambda job: context.copy().run(run, job), jobs)
