"""`cudiff play`: what it serves and to whom, what it takes, and that one job runs at a time, the newest."""

import asyncio
import base64
import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from PIL import Image

from cudiff.cli import main
from cudiff.errors import CudiffError
from cudiff.play import messages
from cudiff.play.messages import Wish, read_picture, read_wish
from cudiff.play.worker import Player, Worker
from tests.test_pipeline import pipeline

WISH = {"number": 1, "label": 3, "guidance": 1.5, "steps": 2, "seed": 0, "strength": 0.5, "moving": False}


def png(width=20, height=10, mode="RGB"):
    content = io.BytesIO()
    Image.new(mode, (width, height), "red" if mode == "RGB" else None).save(content, "PNG")
    return content.getvalue()


# Messages


@pytest.mark.parametrize("change", [
    {"number": -1}, {"number": 1.5}, {"number": 2**60}, {"label": "3"}, {"label": -2}, {"label": True},
    {"guidance": None}, {"guidance": -1}, {"guidance": "1"}, {"steps": 0}, {"steps": 1001}, {"steps": 2.0},
    {"seed": -1}, {"seed": 2**53}, {"seed": [0]}, {"strength": 1.1}, {"strength": {}}, {"moving": 1}, {"more": 1},
], ids=str)
def test_a_wish_out_of_range_is_refused(change):
    assert read_wish(json.dumps(WISH)) == Wish(**WISH)
    with pytest.raises(CudiffError):
        read_wish(json.dumps(WISH | change))


@pytest.mark.parametrize("text", [
    "", "{", "null", "[]", "3", '"x"', "{}", '{"forget": false}', "[" * 4000, "1" * 4097, "é" * 2100,
    json.dumps(WISH).replace("1.5", "NaN"), json.dumps(WISH).replace("1.5", "Infinity"),
    json.dumps(WISH).replace("1.5", "1e999"), "\ud800",
])
def test_what_is_no_wish_is_refused(text):
    with pytest.raises(CudiffError):
        read_wish(text)


def test_a_picture_is_cropped_and_resized(rng):
    pixels = rng.integers(0, 256, (8, 8, 3)).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    np.testing.assert_array_equal(read_picture(content.getvalue(), (8, 8, 3)), pixels)
    gray = read_picture(png(), (8, 8, 1))
    assert gray.shape == (8, 8, 1) and gray.dtype == np.uint8 and (gray == 76).all()
    assert (read_picture(png(mode="RGBA"), (8, 8, 3)) == 255).all()


@pytest.mark.parametrize("content, told", [
    (b"", "cannot be read"), (b"GIF89a", "cannot be read"), (png()[:45], "cannot be read"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read"), (png(4097, 4097, "1"), "pixels"),
], ids=["empty", "header", "cut", "postscript", "large"])
def test_what_is_no_picture_is_refused(content, told):
    with pytest.raises(CudiffError, match=told):
        read_picture(content, (8, 8, 3))


# The worker


class Slow:
    """A pipeline whose sampling takes steps until it is stopped, or has taken `steps` of 10 ms and called `last`."""

    def __init__(self):
        self.config, self.steps, self.last = pipeline().config, [], lambda seed: None

    def sample(self, n, seed, each_step, steps, **options):
        for step in range(steps):
            self.steps.append(seed)
            time.sleep(0.01)
            each_step(step)
        self.last(seed)
        return np.full((n, 8, 8, 1), seed, np.uint8)


@pytest.fixture
def slow():
    worker = Worker(Slow(), 2)
    yield worker
    worker.close()


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_newest_wish_is_drawn_and_stops_the_one_before(slow):
    """After its last step too: the sixth comes when the fifth has been drawn, and is not shown yet."""
    got, steps = [], slow.pipeline.steps
    player = Player(lambda answer, png: got.append(answer["number"]))
    slow.join(player)
    slow.pipeline.last = lambda seed: seed == 5 and slow.ask(player, Wish(6, None, 1.0, 2, 6, 0.5, False))
    for number in range(1, 6):
        slow.ask(player, Wish(number, None, 1.0, 1000 if number < 5 else 3, number, 0.5, False))
        if number == 1:
            wait_for(lambda: steps)
    wait_for(lambda: got)
    time.sleep(0.05)
    assert got == [6] and steps.count(1) < 500 and steps[-5:] == [5, 5, 5, 6, 6] and player.wish is None


def test_who_leaves_stops_what_runs_and_others_take_turns(slow):
    got = []
    first, second = (Player(lambda answer, png, name=name: got.append(name)) for name in "ab")
    for player in (first, second):
        slow.join(player)
    slow.ask(first, Wish(1, None, 1.0, 1000, 7, 0.5, False))
    wait_for(lambda: slow.pipeline.steps)
    slow.ask(second, Wish(1, None, 1.0, 2, 8, 0.5, False))
    slow.leave(first)
    wait_for(lambda: got)
    assert got == ["b"] and slow.pipeline.steps.count(7) < 500


def test_closing_stops_what_runs():
    worker = Worker(Slow(), 1)
    worker.join(player := Player(lambda answer, png: None))
    worker.ask(player, Wish(1, None, 1.0, 1000, 7, 0.5, False))
    wait_for(lambda: worker.pipeline.steps)
    worker.close()
    assert len(worker.pipeline.steps) < 500 and not any(t.name == "cudiff play" for t in threading.enumerate())


def test_a_mistake_is_told_and_the_next_wish_drawn(slow):
    got = []
    player = Player(lambda answer, png: got.append(answer))
    slow.join(player)
    slow.ask(player, Wish(1, None, 1.0, 1, 0, 0.5, True))  # Slow has no stream
    wait_for(lambda: got)
    assert got[0] == {"error": "unexpected AttributeError", "number": 1}
    slow.ask(player, Wish(2, None, 1.0, 1, 0, 0.5, False))
    wait_for(lambda: len(got) > 1)
    assert got[1]["number"] == 2


# The server


@asynccontextmanager
async def serving(host=None, model=None):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: cudiff play needs it")
    import aiohttp

    from cudiff.play.server import Server

    server, ready = Server(model or pipeline(capture=False), 2, host, 0), asyncio.Event()
    task = asyncio.create_task(server.run(lambda address: ready.set()))
    await ready.wait()
    try:
        async with aiohttp.ClientSession() as session:
            yield server, session
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def own(server):
    return server.address.rstrip("/") if not server.token else server.address.removesuffix(f"/{server.token}/")


def opened(server, session, **options):
    options.setdefault("origin", own(server))
    return session.ws_connect(server.address + "socket", max_msg_size=0, **options)


async def answered(connection, wanted="number"):
    """The next answer that has this key, and the picture that comes with it."""
    while True:
        answer = json.loads((await connection.receive(20)).data)
        picture = (await connection.receive(20)).data if "milliseconds" in answer else None
        if wanted in answer:
            return answer, picture


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_the_page_is_for_this_machine_alone(host):
    async def go():
        async with serving(host) as (server, session):
            status = {}
            for name in ("", "play.css", "play.js", "nothing", "../messages.py", "socket"):
                async with session.get(server.address + name, headers={"Origin": own(server)}) as answer:
                    status[name] = answer.status
                    assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
                    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
                    assert answer.headers["X-Frame-Options"] == "DENY"
                    if name == "":
                        text = await answer.text()
                        assert "<script src=" in text and "style=" not in text and answer.content_type == "text/html"
            assert [status[name] for name in ("", "play.css", "play.js")] == [200] * 3
            assert status["nothing"] == 404 and status["../messages.py"] in (403, 404) and status["socket"] == 400
            port = server.port
            for wrong in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}",
                          f"127.0.0.1.evil.example:{port}", f"[::1]:{port}", f"localhost.:{port}", ""):
                async with session.get(server.address, headers={"Host": wrong}) as answer:
                    assert answer.status == 403, wrong
            for wrong in ("http://evil.example", f"http://evil.example:{port}", "null", f"https://127.0.0.1:{port}",
                          "http://127.0.0.1", f"http://127.0.0.1:{port + 1}", f"http://localhost:{port}"):
                async with session.get(server.address, headers={"Origin": wrong}) as answer:
                    assert answer.status == 403, wrong
                with pytest.raises(Exception, match="403"):
                    await opened(server, session, origin=wrong)
            with pytest.raises(Exception, match="403"):
                await opened(server, session, origin=None)
            with pytest.raises(Exception, match="403"):  # a name that was pointed here
                await opened(server, session, origin=f"http://evil.example:{port}",
                             headers={"Host": f"evil.example:{port}"})
            assert server._listening.getsockname()[0] == "127.0.0.1" and server.connections == 0
            server.port = 80  # which browsers leave out
            assert server.knows("127.0.0.1") and server.knows("localhost:80") and not server.knows("evil.example")

    asyncio.run(go())


def test_another_address_demands_its_token():
    async def go():
        async with serving("0.0.0.0") as (server, session):
            base = f"http://127.0.0.1:{server.port}/"
            assert len(server.token) >= 20 and server.address.endswith(f":{server.port}/{server.token}/")
            for path, status in (("", 403), ("play.js", 403), ("x/", 403), ("socket", 403),
                                 (server.token[:-1] + "/", 403), (server.token + "/", 200),
                                 (server.token + "/play.js", 200), (server.token, 404)):
                async with session.get(base + path, headers={"Origin": base[:-1]}) as answer:
                    assert answer.status == status, path
            foreign = {"Host": f"evil.example:{server.port}"}
            async with session.get(base + server.token + "/", headers=foreign) as answer:
                assert answer.status == 403
            async with session.ws_connect(base + server.token + "/socket", origin=base[:-1]) as connection:
                assert "classes" in json.loads((await connection.receive()).data)
            server.port = 80
            assert server.knows("[::1]") and not server.knows("::1") and not server.knows("evil.example")

    asyncio.run(go())


def test_pictures_are_what_sample_draws():
    async def go():
        model = pipeline(capture=False)
        async with serving(model=model) as (server, session), opened(server, session) as connection:
            hello, _ = await answered(connection, "classes")
            assert hello["classes"] == list("0123456789") and hello["steps"] == 3 and hello["count"] == 2
            await connection.send_json(WISH)
            answer, content = await answered(connection)
            shown = np.asarray(Image.open(io.BytesIO(content)))
            expected = model.sample(2, 0, 3, 2, 1.5)
            np.testing.assert_array_equal(shown[1:9, 1:9], expected[0, ..., 0])
            np.testing.assert_array_equal(shown[1:9, 10:18], expected[1, ..., 0])
            assert answer["number"] == 1 and answer["milliseconds"] > 0
            await connection.send_bytes(png())
            await connection.send_json(WISH | {"number": 2, "strength": 0.0})
            _, content = await answered(connection)
            assert (np.asarray(Image.open(io.BytesIO(content)))[1:9, 1:9] == 76).all()
            await connection.send_json({"forget": True})
            await connection.send_json(WISH | {"number": 3})
            _, content = await answered(connection)
            np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content)))[1:9, 1:9], expected[0, ..., 0])

    asyncio.run(go())


def test_frames_move_until_another_wish():
    async def go():
        async with serving() as (server, session), opened(server, session) as connection:
            await connection.send_json(WISH | {"moving": True})
            moving = [await answered(connection) for _ in range(4)]
            assert {answer["number"] for answer, _ in moving} == {1} and len({png for _, png in moving}) == 4
            await connection.send_json(WISH | {"number": 2})
            while (await answered(connection))[0]["number"] == 1:
                pass
            with pytest.raises(asyncio.TimeoutError):
                await connection.receive(0.3)

    asyncio.run(go())


def test_what_is_malformed_is_answered_in_one_line():
    async def go():
        async with serving() as (server, session), opened(server, session) as connection:
            for wrong in ("{", json.dumps(WISH | {"steps": -1}), json.dumps(WISH | {"label": 10}), b"no", "é" * 2100):
                await (connection.send_bytes if isinstance(wrong, bytes) else connection.send_str)(wrong)
                answer, _ = await answered(connection, "error")
                assert answer["error"] and "\n" not in answer["error"]
            await connection.send_json(WISH)
            assert (await answered(connection))[0]["number"] == 1

    asyncio.run(go())


@pytest.mark.parametrize("message", ["x" * 5000, b"\0" * (messages.MOST_PICTURE + 1)], ids=["text", "picture"])
def test_what_is_too_large_ends_the_connection(message):
    async def go():
        async with serving() as (server, session), opened(server, session) as connection:
            await answered(connection, "classes")
            with suppress(ConnectionError):  # closed while the rest is still sent
                await (connection.send_bytes if isinstance(message, bytes) else connection.send_str)(message)
            await connection.receive(20)
            assert connection.closed and connection.close_code in (1009, 1006 if isinstance(message, bytes) else 1009)
            async with opened(server, session) as other:  # and the server goes on
                await answered(other, "classes")

    asyncio.run(go())


def test_four_connections_and_who_leaves_makes_room():
    async def go():
        async with serving() as (server, session):
            connections = [await opened(server, session) for _ in range(4)]
            with pytest.raises(Exception, match="503"):
                await opened(server, session)
            await connections[0].send_json(WISH | {"moving": True})
            await answered(connections[0])
            await connections[0].close()
            while server.connections == 4:
                await asyncio.sleep(0.01)
            assert len(server.worker._players) == 3 and not any(p.wish for p in server.worker._players)
            await (await opened(server, session)).close()
            for connection in connections:
                await connection.close()

    asyncio.run(go())


def test_a_slow_page_loses_frames():
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: cudiff play needs it")
    from cudiff.play.server import Outgoing

    class Connection:
        def __init__(self):
            self.sent, self.ready = [], asyncio.Event()

        async def send_str(self, text):
            await self.ready.wait()
            self.sent.append(json.loads(text))

        async def send_bytes(self, content):
            self.sent.append(content)

    async def go():
        outgoing = Outgoing(connection := Connection())
        task = asyncio.create_task(outgoing.send_all())
        for number in range(50):
            outgoing.put({"number": number}, b"%d" % number)
            await asyncio.sleep(0)
        for answer in (others := [{"classes": ["a"]}, {"error": "one line"}]):
            outgoing.put(answer, None)
        connection.ready.set()
        await asyncio.sleep(0.05)
        task.cancel()
        assert connection.sent == [{"number": 0}, b"0", {"number": 49}, b"49", *others]

    asyncio.run(go())


def test_bad_options_are_one_line(tmp_path, capsys):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: cudiff play needs it")
    pipeline().save(tmp_path / "model.safetensors")
    pipeline(channels=4).save(tmp_path / "latents.safetensors")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, told in (
            (["model", "--port", port], f"port {port} of 127.0.0.1 (Address already in use): give another --port"),
            (["model", "--host", "192.0.2.1", "--port", 0], "cannot listen on port 0 of 192.0.2.1"),
            (["model", "--host", "nope.invalid", "--port", 0], "cannot listen on port 0 of nope.invalid"),
            (["model", "--port", 70000], "--port must be 0 to 65535"), (["model", "-n", 0], "-n must be"),
            (["latents"], "the model makes latents"), (["none"], "none"),
        ):
            assert main(["play", str(tmp_path / f"{arguments[0]}.safetensors"), *map(str, arguments[1:])]) == 2
            error = capsys.readouterr().err
            assert told in error and error.count("\n") == 1 and "Unknown error" not in error


def test_without_aiohttp_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("cudiff.play.command.find_spec", lambda name: None)
    assert main(["play", "none"]) == 2
    assert "cudiff play needs aiohttp: pip install 'cudiff[play]'" in capsys.readouterr().err


class Browser:
    """A page in headless Chromium, by its DevTools protocol."""

    def __init__(self, connection):
        self.connection, self.number = connection, 0

    async def call(self, method, **parameters):
        self.number += 1
        await self.connection.send_json({"id": self.number, "method": method, "params": parameters})
        while (answer := json.loads((await self.connection.receive(30)).data)).get("id") != self.number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    async def value(self, script):
        return (await self.call("Runtime.evaluate", expression=script, returnByValue=True))["result"].get("value")

    async def until(self, script):
        end = time.monotonic() + 60
        while not await self.value(script):
            assert time.monotonic() < end, (script, await self.value("document.body.innerText"))
            await asyncio.sleep(0.05)

    async def press(self, key):
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if kind == "keyDown" else "")

    async def size(self, width, height):
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                        mobile=width < 500)

    async def screenshot(self, path):
        shot = await self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browsing(folder, session, address):
    chromium = shutil.which("chromium") or pytest.skip("chromium is not installed")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
               "--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            told, end = folder / "DevToolsActivePort", time.monotonic() + 60
            while not told.exists() or "/" not in told.read_text():
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            async with session.get(f"http://127.0.0.1:{told.read_text().split()[0]}/json/list") as answer:
                (page,) = [page for page in await answer.json() if page["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as connection:
                browser = Browser(connection)
                await browser.size(1200, 800)
                await browser.call("Page.navigate", url=address)
                yield browser
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_in_chromium(host, tmp_path):
    """The page draws, moves and rests by keys, shows a mistake, and fits a phone's width."""
    drawn = "document.getElementById('pictures').toDataURL()"
    speed = "document.getElementById('speed').textContent"

    async def go():
        async with serving(host) as (server, session), browsing(tmp_path / "browser", session, server.address) as page:
            await page.until(f"/ ms, cpu/.test({speed})")
            assert await page.value("[pictures.width, pictures.height]") == [19, 10]
            assert await page.value("document.querySelectorAll('option').length") == 12
            for key in "7n":
                before = await page.value(drawn)
                await page.press(key)
                await page.until(f"{drawn} !== {json.dumps(before)}")
            assert await page.value("[label.value, seed.value]") == ["7", "1"]
            await page.press("m")
            await page.until(f"/ frames.s, /.test({speed})")
            await page.screenshot(tmp_path / "wide.png")
            await page.size(390, 844)
            assert await page.value("document.documentElement.scrollWidth") == 390
            await page.screenshot(tmp_path / "phone.png")
            await page.press("m")
            await page.until("!moving.checked")
            await page.value("seed.value = -3, ask(), socket.send('{')")
            await page.until("mistake.textContent !== ''")

    asyncio.run(go())


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for another process")
def test_ctrl_c_ends_the_command(tmp_path):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: cudiff play needs it")
    pipeline().save(tmp_path / "model.safetensors")
    command = [sys.executable, "-m", "cudiff", "play", "model.safetensors", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        address = server.stdout.readline().split()[1]
        assert address.startswith("http://127.0.0.1:")
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130 and server.stderr.read() == "cudiff: interrupted\n"
