"""The CUDA C sources; a package so that they travel inside the wheel (see `cudiff.cuda.compiler`)."""
