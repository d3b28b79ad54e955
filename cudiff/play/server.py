"""The page and its WebSocket, on this machine, for nobody else's pages."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.http_exceptions import HttpProcessingError

from cudiff.errors import CudiffError
from cudiff.play.messages import MOST_PICTURE, MOST_TEXT, read_picture, read_wish
from cudiff.play.worker import Player, Worker

MOST_CONNECTIONS = 4
HEARTBEAT = 20.0
"""Seconds between two pings; who does not answer one is gone."""
PAGES = {"": ("index.html", "text/html"), "play.css": ("play.css", "text/css"),
         "play.js": ("play.js", "text/javascript")}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server:
    """The routes of one address. host: None for 127.0.0.1; any other is served with a random token in its address.

    Every request's Host must be a name of the address, with the port, and its Origin, where a browser names one and for
    the WebSocket always, the same: a page of another origin, or a name that was pointed here, gets 403.
    """

    def __init__(self, pipeline: Any, n: int, host: str | None, port: int):
        self.pipeline, self.n, self.connections = pipeline, n, 0
        self.token = "" if host is None else secrets.token_urlsafe(16)
        self._listening = listening(host or "127.0.0.1", port)
        self._host, self.port = host or "127.0.0.1", self._listening.getsockname()[1]
        self.worker = Worker(pipeline, n)

    @property
    def address(self) -> str:
        name = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{name}:{self.port}/" + (f"{self.token}/" if self.token else "")

    async def run(self, ready: Callable[[str], None]) -> None:
        """Serve until cancelled; ready(address) is called once the page can be opened."""
        app = web.Application(middlewares=[self._guard], client_max_size=MOST_TEXT)
        app.on_response_prepare.append(_add_headers)
        start = f"/{self.token}/" if self.token else "/"
        for name in PAGES:
            app.router.add_get(start + name, self._page)
        app.router.add_get(start + "socket", self._socket)
        logging.getLogger("aiohttp.server").addFilter(_is_ours)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, self._listening).start()
            ready(self.address)
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(self.worker.close)
            await runner.cleanup()

    def knows(self, host: str) -> bool:
        """Whether a Host header names this address: a name that someone's DNS points here is none."""
        host = host if re.search(r":\d+$", host) else f"{host}:80"  # which browsers leave out
        name, _, port = host.rpartition(":")
        if port != str(self.port):
            return False
        name = name.removeprefix("[").removesuffix("]").lower()
        if self._host in ("0.0.0.0", "::"):
            with suppress(ValueError):
                return bool(ipaddress.ip_address(name))  # no DNS is asked for a number
            return name in ("localhost", socket.gethostname().lower())
        return name in ({"127.0.0.1", "localhost"} if self._host == "127.0.0.1" else {self._host.lower()})

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        hosts, origins = request.headers.getall("Host", []), request.headers.getall("Origin", [])
        if len(hosts) != 1 or not self.knows(hosts[0]):
            raise web.HTTPForbidden(text="cudiff play: unknown Host\n")
        socket_asked = request.path.endswith("/socket")
        if origins != [f"http://{hosts[0]}"] and (origins or socket_asked):
            raise web.HTTPForbidden(text="cudiff play: foreign Origin\n")
        if self.token and not hmac.compare_digest(request.path.split("/")[1].encode(), self.token.encode()):
            raise web.HTTPForbidden(text="cudiff play: open the address that it printed\n")
        return await handler(request)

    async def _page(self, request: web.Request) -> web.Response:
        name, kind = PAGES[request.path.rpartition("/")[2]]
        content = (files("cudiff.play") / "page" / name).read_bytes()
        return web.Response(body=content, content_type=kind, charset="utf-8")

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        if self.connections >= MOST_CONNECTIONS:
            raise web.HTTPServiceUnavailable(text=f"cudiff play: {MOST_CONNECTIONS} pages are open, close one\n")
        self.connections += 1
        try:
            connection = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=MOST_PICTURE + 1, compress=False)
            await connection.prepare(request)
            await self._serve(connection)
            return connection
        finally:
            self.connections -= 1

    async def _serve(self, connection: web.WebSocketResponse) -> None:
        loop, outgoing = asyncio.get_running_loop(), Outgoing(connection)

        def deliver(answer: dict[str, Any], png: bytes | None) -> None:
            loop.call_soon_threadsafe(outgoing.put, answer, png)

        player = Player(deliver)
        self.worker.join(player)
        sender = asyncio.create_task(outgoing.send_all())
        try:
            outgoing.put(self._introduction(), None)
            async for message in connection:
                if message.type is WSMsgType.TEXT and len(message.data) > MOST_TEXT:
                    await connection.close(code=WSCloseCode.MESSAGE_TOO_BIG)
                    break
                if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                    try:
                        await self._take(player, message.data)
                    except CudiffError as error:
                        outgoing.put({"error": str(error)}, None)
        finally:
            self.worker.leave(player)
            sender.cancel()

    async def _take(self, player: Player, data: str | bytes) -> None:
        if isinstance(data, bytes):
            picture = await asyncio.to_thread(read_picture, data, self.pipeline.shape)
            self.worker.show(player, picture)
            return
        wish = read_wish(data)
        if wish is None:
            self.worker.show(player, None)
        else:
            self.worker.ask(player, wish)

    def _introduction(self) -> dict[str, Any]:
        config = self.pipeline.config
        names = list(self.pipeline.class_names) or [str(number) for number in range(config.num_classes)]
        return {"classes": names, "guidance": config.guidance, "steps": config.sample_steps,
                "device": self.pipeline.device, "count": self.n}


class Outgoing:
    """What waits to be sent to one page. A newer frame takes the place of one that a slow page has not taken yet."""

    def __init__(self, connection: web.WebSocketResponse):
        self._connection = connection
        self._waiting: dict[str, tuple[dict[str, Any], bytes | None]] = {}
        self._filled = asyncio.Event()

    def put(self, answer: dict[str, Any], png: bytes | None) -> None:
        kind = "error" if "error" in answer else "classes" if "classes" in answer else "frame"
        self._waiting[kind] = answer, png
        self._filled.set()

    async def send_all(self) -> None:
        """Send what comes, until cancelled or the page is gone."""
        with suppress(ConnectionError):
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._waiting:
                    answer, png = self._waiting.pop(next(iter(self._waiting)))
                    await self._connection.send_str(json.dumps(answer))
                    if png is not None:
                        await self._connection.send_bytes(png)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises CudiffError where the port is in use, or the address is not this machine's."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None) or 0  # below 0 where the name was not found
        what = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
        raise CudiffError(f"cannot listen on port {port} of {host} ({what}): give another --port or --host") from None


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an error is to be shown: a malformed request is answered, and the terminal is not told."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
