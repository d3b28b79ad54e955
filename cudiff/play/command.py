"""`cudiff play`: its options, and what it does."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from os.path import expanduser
from typing import Any

from cudiff.backend import PRECISIONS
from cudiff.errors import CudiffError
from cudiff.registry import SAMPLERS
from cudiff.values import whole

PORT = 8000
MOST_PICTURES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=expanduser, metavar="CHECKPOINT",
                        help="a file, or a run's folder for its newest one")
    parser.add_argument("-n", type=int, default=4, metavar="N",
                        help=f"pictures at once, 1 to {MOST_PICTURES} (default 4)")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"0 takes a free one (default {PORT})")
    parser.add_argument("--host", metavar="ADDRESS",
                        help="of this machine, for others to open the page, by a random token in its address "
                             "(default: this machine alone)")
    parser.add_argument("--sampler", choices=tuple(SAMPLERS), metavar="NAME", help="(default: the model's)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), metavar="auto|cpu|cuda")
    parser.add_argument("--precision", choices=("auto", *PRECISIONS), metavar="NAME",
                        help="(default: that of training on the GPU, fp32 on the CPU)")


def play(options: argparse.Namespace, load: Callable[[argparse.Namespace], Any], say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; load(options) gives the pipeline. Raises CudiffError for what is not served."""
    if find_spec("aiohttp") is None:
        raise CudiffError("cudiff play needs aiohttp: pip install 'cudiff[play]'")
    from cudiff.play.server import Server

    whole("-n", options.n, 1, MOST_PICTURES), whole("--port", options.port, 0, 65535)
    pipeline = load(options)
    if pipeline.makes_latents:
        raise CudiffError("the model makes latents, not pictures: there is nothing to show")
    if options.sampler is not None:
        pipeline.config = pipeline.config.replace(sampler=options.sampler)
    server = Server(pipeline, options.n, options.host, options.port)
    asyncio.run(server.run(lambda address: say(f"open {address} in a browser; Ctrl-C ends it")))
