"""Repairs inside vLLM's own processes: fakes, kernels, expert layers and casts, made by ``plugin.activate``."""
