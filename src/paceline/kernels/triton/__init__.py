"""Fast versions of the operations as Triton kernels, imported only where a GPU is used (or the interpreter, in tests)."""
