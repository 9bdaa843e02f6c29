"""Parts of the gemm family."""
