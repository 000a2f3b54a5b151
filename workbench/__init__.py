"""Decode workbench: where every microsecond of an LLM decode step goes."""

__version__ = "0.1.0"
