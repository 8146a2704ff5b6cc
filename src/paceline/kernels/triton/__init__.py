"""Operations as Triton kernels, imported only where a GPU is used (in tests: under Triton's interpreter)."""
