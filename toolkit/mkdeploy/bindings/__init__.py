"""Bindings to the native engine: `signatures` says what mkd.h says, `session` is what people use.

Nothing is imported here: the native library loads on the first call that needs it.
"""
