"""What `examples/bench.py` runs: each file a part of it."""
