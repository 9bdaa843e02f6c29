// Operators of the prefill family: one module per configuration, in a namespace of its own. The kernels are
// in prefill_cpu.cc, prefill_cuda.cu and prefill_sm90a.cu.
#define FLASHINFER_ATTENTION_NAME "prefill"
#include "attention/operators.h"

FLASHINFER_ATTENTION_LIBRARY
