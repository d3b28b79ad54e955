"""The operations, and the operators and methods they give to Tensor."""

__all__: list[str] = []
