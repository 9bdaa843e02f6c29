"""What the gemm family is made of."""
