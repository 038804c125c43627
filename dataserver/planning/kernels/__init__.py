"""Compiled functions of the planner: int64 arrays in and out.

Numba compiles each kernel on its first call and caches its machine code (`cache.py` says where). Numba takes a second
and much memory to import. So modules of this package are imported only inside the functions that call a kernel, never
at the top of a module: numba belongs to the extra `server`, and a trainer needs none.

What takes long to compile is kept out of kernels: numpy's functions (`arrays.py` has loops for them), slices assigned
to slices, and arrays made inside. A plain function makes the arrays that a kernel works on, and calls it. Each level of
parts is compiled once more in its caller, so there are few, and what is called in one place is inlined.
"""
