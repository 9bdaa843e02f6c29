#!/bin/bash
# Builds the emulation from this tree's kernels: experiment/emulate/build.sh OUT
here=$(dirname "$0"); root=$here/../..; tmp=$(mktemp -d)
mkdir -p $tmp/flashinfer/cuda/attention/backward && cp -r $root/include/flashinfer/cuda/attention/backward/. $tmp/flashinfer/cuda/attention/backward
sed -i 's/extern __shared__ uint8_t raw\[\];/uint8_t* const raw = emu::block->memory.data();/' $tmp/flashinfer/cuda/attention/backward/sm90/kernel.cuh
sed -i 's/extern __shared__ __align__(128) uint8_t memory\[\];/uint8_t* memory = nullptr;/' $tmp/flashinfer/cuda/attention/backward/kernel.cuh
g++ -std=c++17 -O1 -g -w -DFLASHINFER_CUDA -D__CUDA_ARCH_FEAT_SM90_ALL -I$tmp -I$here -I$root/include -isystem /usr/local/cuda/include "$here/run.cc" -o "$1" -lpthread
