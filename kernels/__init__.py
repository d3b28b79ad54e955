"""The CUDA C sources; a package so that they travel inside the wheel (see `cudiff.cuda.compiler`).

common: headers that any kernel may include. portable: kernels for every architecture. sm90: Hopper's, and the headers
that only they include. tuned: a GPU's measured plans (see `cudiff.cuda.tiles`).
"""
