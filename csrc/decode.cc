// Operators of the decode family: one module per configuration, in a namespace of its own. The kernels are in
// decode_cpu.cc and decode_cuda.cu.
#define FLASHINFER_ATTENTION_NAME "decode"
#include "attention/operators.h"

FLASHINFER_ATTENTION_LIBRARY
