"""What only the benchmark of orchestration needs: all choices one by one, and the paper's problems."""
