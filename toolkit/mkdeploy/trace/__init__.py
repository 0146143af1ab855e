"""Routing traces: which experts every token of a text chose (docs/trace.md).

`record` writes one, `file` holds its format, `replay` scores cache policies on it.
"""
