"""Compiled loops of image decoding. Import only inside the functions that call them: numba is heavy."""
