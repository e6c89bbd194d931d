"""Probes: one question a module, asked inside the interpreter that has torch and vLLM.

This package is the target half (docs/design.md): it imports the standard library at module level and torch, vLLM or IPEX only
inside the function that needs them. It never imports the host half, nor typer, rich or pydantic.
"""
