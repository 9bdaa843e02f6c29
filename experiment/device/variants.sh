#!/bin/bash
# Builds libraries of variants of the kernel into a folder: experiment/device/variants.sh OUT
here=$(cd "$(dirname "$0")" && pwd); root=$here/../..; out=$1
build() {  # name, command run in the copy's backward folder
  tmp=$(mktemp -d); cp -r $root/include $tmp/include
  (cd $tmp && eval "$2") || { echo "$1 does not apply"; return; }
  nvcc -shared -Xcompiler -fPIC -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 -Xptxas=-v -I$tmp/include $here/dev.cu -o $out/bw_$1.so > $tmp/log 2>&1
  echo "$1: $(grep -c C75 $tmp/log) serialised, spills: $(grep -E '[1-9][0-9]* bytes spill' $tmp/log | wc -l) $(grep -m1 error $tmp/log)"
  rm -rf $tmp
}
B=include/flashinfer/cuda/attention/backward/sm90
build base true &
build V1 "patch -s -p1 < $here/../variants/V1.patch" &                                      # dq leaves right after its product
build SUM1 "sed -i 's/kSumStages = kDim == 128 ? 2 : 1/kSumStages = 1/' $B/shape.cuh" &     # one buffer of sums at d128
build NOTURN "sed -i 's/while (ptx::load_acquire(memory.turns + number) != turn)/while (false)/' $B/load.cuh" &  # WRONG bits: what order costs
build NOADD "sed -i 's/while (ptx::load_acquire(memory.turns + number) != turn)/while (false)/; s/if (turn == 0) {/if (turn == 12345678) {/; s/      } else {/      } else if (turn == 12345679) {/' $B/load.cuh" &  # WRONG: what the adds cost
for mb in 6 12 96 1000; do build C$mb "sed -i 's/int64_t{\?24\(}\?\) << 20/int64_t{$mb} << 20/; s/= 24 << 20/= int64_t{$mb} << 20/' $B/launch.cuh" & done  # heads together; base 24
wait
