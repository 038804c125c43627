"""What `scripts/gpu_check` and `scripts/bench_gpu.py` run on a GPU."""
