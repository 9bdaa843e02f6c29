// The includes and macros of every binding.
//
// Only bindings include torch, and they are compiled as C++ for every backend: nvcc needs six seconds for
// torch's headers, g++ needs one. Kernels live in files that do not include torch.
#pragma once

#include "binding/boxing.h"
#include "binding/check.h"
#include "binding/device.h"
#include "binding/memory.h"
#include "binding/view.h"

// Register the operators of a binding for the backend that it is compiled for.
#define FLASHINFER_LIBRARY(m) FLASHINFER_LIBRARY_(FLASHINFER_NAMESPACE, FLASHINFER_DISPATCH_KEY, m)
#define FLASHINFER_LIBRARY_(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
