"""Noise schedules, preconditioning, losses and samplers. They are handed a `net` and never import one."""
