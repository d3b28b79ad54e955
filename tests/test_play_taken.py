"""What `cudiff play` takes: pictures of 16 bits, of the largest size, and requests that are none."""

import asyncio
import io

import numpy as np
from PIL import Image

from cudiff.play import messages
from tests.test_play import answered, opened, serving


def test_gray_of_16_bits_keeps_its_upper_byte(rng):
    pixels, content = rng.integers(0, 256, (8, 8, 1)), io.BytesIO()
    Image.fromarray((pixels[..., 0] * 257).astype(np.uint16)).save(content, "PNG")
    np.testing.assert_array_equal(messages.read_picture(content.getvalue(), (8, 8, 1)), pixels)


def test_a_picture_of_the_largest_size_is_answered():
    async def go():
        async with serving() as (server, session), opened(server, session) as connection:
            await connection.send_bytes(b"\0" * messages.MOST_PICTURE)
            assert "cannot be read" in (await answered(connection, "error"))[0]["error"]

    asyncio.run(go())


def test_the_terminal_is_not_told_of_a_malformed_request(caplog):
    async def go():
        async with serving() as (server, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
            await writer.wait_closed()

    asyncio.run(go())
    assert not [record for record in caplog.records if record.name.startswith("aiohttp")]
