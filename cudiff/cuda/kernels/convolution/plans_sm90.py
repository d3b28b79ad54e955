"""The output tiles of `conv2d_sm90`, how blocks share them, and the times that this takes."""

from __future__ import annotations

import math
from typing import NamedTuple

from cudiff.cuda.device import multiprocessors
from cudiff.cuda.launch import blocks
from cudiff.cuda.tiles import Planner

CHANNELS = 64  # of a tile
ROW_BYTES = 128  # of shared memory
SHARED_BYTES = 228 << 10  # of a multiprocessor; a block takes 1 KiB more than it asks for
BARRIER_BYTES = 1024
MAP_BYTES = 1024  # of the affine maps of a norm's channels
CLUSTERS = (1, 2, 4, 8)  # blocks of a cluster
MOST_PARTS = 16  # blocks of a tile with stream-K: the first adds what others leave, in turn. Up to 11 were measured
IMAGES = {2: 256, 3: 256, 4: 192}  # of a tile of several, and its most pixels: four of 6x6 or 7x7 spill registers
MOST_HALOS = 8  # halo tiles in flight
MOST_SHARES = 3  # tiles of a block with stream-K: with more, whole ones took less time at 10 of 11 shapes


TILES = (256, 224, 216, 208, 192, 160, 136, 128, 112, 96, 64)  # pixels of an output tile
ALWAYS = (256, 128, 64)  # tried for images of any height: see `plans`


class Plan(NamedTuple):
    """A launch configuration. pixels: of an output tile. cluster: blocks of a cluster, which split the depth. rows: of
    an output tile. blocks: clusters for each 64 output channels. halos: halo tiles in flight. weights: weights in
    flight, of R taps each. shared: bytes of shared memory. together: 0, or with stream-K (arXiv 2301.03598), where all
    tiles are cut along the depth into equal shares, one for each of `blocks`: how many blocks read the same weights at
    the same time. images: of a tile; of several, each has `rows` of it. whole_rows: whether a tile has whole rows of an
    image, else it is 8 pixels wide."""

    pixels: int
    cluster: int
    rows: int
    blocks: int
    halos: int
    weights: int
    shared: int
    together: int = 0
    images: int = 1
    whole_rows: bool = False

    @property
    def choice(self) -> list[int]:
        numbers = [self.pixels, self.cluster, int(self.together > 0), self.images, int(self.whole_rows)]
        most = 5 if self.whole_rows else 4 if self.images > 1 else 3 if self.together else 2
        return numbers[:most]


def plans(shape: tuple[int, ...], outputs: int, kernel: tuple[int, int], itemsize: int, skip: int,
          upsample: bool) -> list[Plan]:
    """All plans. shape: x's, after upsampling. outputs: channels of the result. skip: channels of a skip path, or 0.

    Tiles other than ALWAYS are tried where they cover an image with fewer rows than those of 256 and of 128 pixels do:
    28 rows are one tile of 224 pixels, 40 are two of 160. Several images are tried in the smallest tile that they fit,
    and whole rows in the smallest of those that cut an image into as many tiles.
    """
    fewest = min(_covered(shape[1], pixels) for pixels in ALWAYS[:2])
    fitted = (
        fit(pixels, shape, outputs, kernel, itemsize, cluster, skip, upsample, stream_k)
        for pixels in TILES if pixels in ALWAYS or _covered(shape[1], pixels) < fewest
        for cluster, stream_k in (*((cluster, False) for cluster in CLUSTERS), (1, True))
    )
    several = (
        fit(pixels, shape, outputs, kernel, itemsize, 1, skip, upsample, stream_k, images)
        for pixels, images in _of_several(shape, kernel[0], upsample) for stream_k in (False, True)
    )
    whole = (
        fit(pixels, shape, outputs, kernel, itemsize, 1, skip, upsample, stream_k, whole_rows=True)
        for pixels in _of_whole_rows(shape, kernel[1], upsample) for stream_k in (False, True)
    )
    return [plan for plan in (*fitted, *several, *whole) if plan is not None]


def _of_several(shape: tuple[int, ...], taps: int, upsample: bool) -> list[tuple[int, int]]:
    """Of each number of whole images of this shape, which are up to 8 pixels wide, the pixels of the smallest tile.
    Between two lie the rows of zeros that pad both, so many as `taps` // 2, half of the rows of taps."""
    if upsample or shape[2] > 8:
        return []
    gap, found = taps // 2, []
    for images, most in IMAGES.items():
        fitting = [pixels for pixels in TILES if images * (shape[1] + gap) - gap <= pixels // 8 <= most // 8]
        if fitting and images <= shape[0]:
            found.append((min(fitting), images))
    return found


def _of_whole_rows(shape: tuple[int, ...], columns: int, upsample: bool) -> list[int]:
    """Of each number of tiles of an image, the pixels of the smallest tile of whole rows, for a weight of `columns`
    columns. There is none where the columns of 8 pixels of other tiles fill the image's width. With 256 pixels
    registers spill."""
    if upsample or shape[2] < 8 or shape[2] % 8 == 0:
        return []
    rows = {pixels: pixels // pitch_of(columns, False, shape[2]) for pixels in TILES[1:]}
    return list({blocks(shape[1], most): pixels for pixels, most in rows.items() if most > 0}.values())


def _covered(height: int, pixels: int) -> int:
    """Rows of the tiles that cover an image of so many rows."""
    return blocks(height, pixels // 8) * (pixels // 8)


def tiles_of(shape: tuple[int, ...], rows: int, whole_rows: bool) -> int:
    """Output tiles of `rows` rows, whole ones or of 8 pixels, of one image of (N, H, W, C)."""
    return blocks(shape[1], rows) * (1 if whole_rows else blocks(shape[2], 8))


def count_of(shape: tuple[int, ...], rows: int, images: int, whole_rows: bool) -> int:
    """Output tiles of all images, `images` of them and `rows` of each in a tile."""
    return blocks(shape[0], images) * tiles_of(shape, rows, whole_rows)


def pitch_of(columns: int, upsample: bool, width: int = 0) -> int:
    """Pixels of a row of a halo tile, for a weight of `columns` columns. With `upsample` they are loaded in pairs.
    width: that of an image, for tiles of its whole rows; then zeros between two rows pad both."""
    if width > 0:
        return width + columns // 2
    return 8 + columns - 1 + (2 * (columns // 2 % 2) if upsample else 0)


def steps_of(channels: int, kernel: tuple[int, int], itemsize: int, skip: int) -> tuple[int, int]:
    """A tile's steps for x, each R taps of a chunk of channels; and for the skip path, each a chunk of channels."""
    own, skips = (-(-count * itemsize // ROW_BYTES) for count in (channels, skip))
    return kernel[1] * own, skips


def spared_k_steps(channels: int, itemsize: int) -> int:
    """How many of the last chunk's four k-steps, of 32 bytes each, lie beyond so many channels: they are left out."""
    return -channels * itemsize % ROW_BYTES // 32


def splits_of(steps: int, cluster: int) -> list[tuple[int, int]]:
    """For each block of a cluster, its first step and the next block's first step."""
    return [(steps * rank // cluster, steps * (rank + 1) // cluster) for rank in range(cluster)]


def at_once(cluster: int) -> int:
    """How many clusters of `cluster` blocks run at once, each block on a multiprocessor of its own. Clusters of four
    and more blocks fit on only 120 of an H200's 132 multiprocessors."""
    count = multiprocessors()
    return (count if cluster <= 2 else count * 120 // 132) // cluster


def fit(pixels: int, shape: tuple[int, ...], outputs: int, kernel: tuple[int, int], itemsize: int,
        cluster: int = 1, skip: int = 0, upsample: bool = False, stream_k: bool = False,
        images: int = 1, whole_rows: bool = False) -> Plan | None:
    """The plan for tiles of so many pixels and this cluster, or None. With `images` above 1 they are those of one of
    `_of_several`, with `whole_rows` of `_of_whole_rows`.

    It is None if shared memory has no room for two halo tiles and two weights of R taps. With `upsample` it must have
    room for three weights, because halo tiles are loaded row by row: with two, 128 channels at 64 x 64 take 69 µs, with
    a smaller tile 64. It is also None if a cluster's blocks cannot split the depth: each must have a step of it, and
    all clusters must run at once. Only the smallest tile is split, because larger ones gained nothing. There is no
    plan with `stream_k` if a block has more than MOST_SHARES tiles.
    """
    pitch = pitch_of(kernel[1], upsample, shape[2] if whole_rows else 0)
    rows, of_halo = min(shape[1], pixels // 8), (pixels // 8 + kernel[0] - 1) * pitch  # pixels
    if whole_rows:
        rows = blocks(shape[1], blocks(shape[1], pixels // pitch))
        of_halo = (rows + kernel[0] - 1) * pitch + kernel[1] // 2
    count = count_of(shape, rows, images, whole_rows)
    iterations = blocks(count, max(1, at_once(cluster) // blocks(outputs, CHANNELS)))
    own, skips = steps_of(shape[3], kernel, itemsize, skip)
    each, together, finished = blocks(count, iterations), 0, min(2, iterations)
    if stream_k:
        everything = count * blocks(outputs, CHANNELS)
        if everything > MOST_SHARES * multiprocessors():
            return None
        together = max(d for d in range(1, multiprocessors() + 1) if multiprocessors() % d == count % d == 0)
        each = min(multiprocessors(), everything * min(own + skips, MOST_PARTS))
        iterations, finished = 2, 1 if everything <= each else 2  # it finishes the tiles that it begins
    crowded = count * blocks(outputs, CHANNELS) > at_once(cluster)
    if cluster > 1 and (crowded or cluster > own + skips or pixels != TILES[-1]):
        return None
    splits = splits_of(own + skips, cluster)

    def chunk(step: int) -> int:
        return min(step, own) // kernel[1] + max(0, step - own)

    chunks = max(chunk(last - 1) - chunk(first) + 1 for first, last in splits)
    steps = max(last - first for first, last in splits)
    halo = blocks(of_halo * ROW_BYTES, 1024) * 1024
    weight = kernel[0] * CHANNELS * ROW_BYTES
    results = finished * blocks(pixels // 8 // cluster, 2) * 2 * 8 * CHANNELS * itemsize
    if cluster > 1:
        results += pixels * CHANNELS * 4
    others = BARRIER_BYTES + images * MAP_BYTES + results
    room = SHARED_BYTES - 1024 - others
    # A 1x1 convolution and a skip path read a halo tile for one step only: they need more of them in flight.
    for halos in (MOST_HALOS, 6, 4, 2) if kernel == (1, 1) else (4 if skip else 2, 2):
        weights = min(steps, 16, (room - min(halos, chunks * iterations) * halo) // weight)
        if weights >= min(steps, max(4, halos)):
            break
    if weights < min(steps, 3 if upsample else 2):
        return None
    halos = min(MOST_HALOS, chunks * iterations, (room - weights * weight) // halo)
    shared = halos * halo + weights * weight + others
    return Plan(pixels, cluster, rows, each, halos, weights, shared, together, images, whole_rows)


def time(chosen: Plan, shape: tuple[int, ...], outputs: int, kernel: tuple[int, int], itemsize: int, skip: int,
         upsample: bool) -> float:
    """Estimated microseconds, fitted to 21,364 plans of 3,147 problems on an H200: see docs/kernel-notes.md. What fused
    ops add is left out: it is nearly the same for all plans of a problem."""
    pixels, images, own = chosen.pixels, math.prod(shape[:3]), steps_of(shape[3], kernel, itemsize, skip)[0]
    tiles, columns = count_of(shape, chosen.rows, chosen.images, chosen.whole_rows), blocks(outputs, CHANNELS)
    iterations = tiles * columns / chosen.blocks if chosen.together else blocks(tiles, chosen.blocks)
    products = _products(chosen, iterations, shape[3], kernel, itemsize, skip)
    if upsample:  # halo tiles are loaded row by row
        loads = 0.086 * (chosen.rows + kernel[0] - 1)
        products = max(products, blocks(own, kernel[1] * chosen.cluster) * loads)
    epilogue = 1.33 * pixels / 256 / chosen.cluster * (1.4 if itemsize == 4 else 1)
    weights = outputs * (math.prod(kernel) * shape[3] + skip) * itemsize
    memory = (weights + images * (shape[3] / (4 if upsample else 1) + outputs + skip) * itemsize) / 9e6
    if chosen.together:
        exchange = (0.25 + 0.0039 * pixels) / iterations  # by a tile's blocks in turn
        walk = 0.41 * (iterations + 1) + max(iterations * products, weights / 5e6)
        return 4.62 + walk + exchange + epilogue + memory
    walk = 0.41 + products
    if iterations > 1:
        walk = max(walk, (walk + epilogue) / 2)  # of two warpgroups that alternate
    return 2.2 + iterations * walk + epilogue + memory + (0.65 if chosen.cluster > 1 else 0.0)


def _products(chosen: Plan, iterations: float, channels: int, kernel: tuple[int, int], itemsize: int,
              skip: int) -> float:
    """Estimated microseconds of a tile's products, with the waits for halo tiles."""
    step = max(0.1065 + 0.00027 * chosen.pixels, 0.01 + 0.00106 * chosen.pixels)  # of a tap and a chunk
    step *= 0.97 if chosen.whole_rows else 1.06 if chosen.images > 1 else 1.0
    own, skips = steps_of(channels, kernel, itemsize, skip)
    unspared = 1 - kernel[1] * spared_k_steps(channels, itemsize) / (4 * own)
    halos, latency, chunk = chosen.halos, 0.0036 * chosen.pixels, math.prod(kernel) * step

    def share(first: int, last: int) -> float:
        x, path = min(last, own) - min(first, own), max(last, own) - max(first, own)  # steps
        products, chunks = (kernel[0] * x * unspared + path) * step, blocks(x, kernel[1])
        if chunks * iterations + path <= halos:
            return products  # all halo tiles are loaded at once
        products += chunks * max(0.0, (latency + chunk) / halos - chunk)
        if path > 0:  # its chunks have one tap each; behind them are the first of the next tile
            products += latency * max(0, path + 2 - halos) / halos
        return products

    return max(share(first, last) for first, last in splits_of(own + skips, chosen.cluster))


plan = Planner("conv2d_sm90", plans, time, version=4)
