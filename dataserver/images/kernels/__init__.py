"""Kernels of image decoding, imported by modules that are themselves loaded late."""
