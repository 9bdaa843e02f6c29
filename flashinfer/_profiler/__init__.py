"""Events of kernels: the buffer that they write, traces made of it, and pages to look at."""
