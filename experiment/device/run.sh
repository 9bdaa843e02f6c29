export LIBS="$OUT/bw_*.so" FLASHINFER_CUDA_ARCH_LIST=9.0a
timeout -k 2 12 python3 experiment/device/run1.py check 2>&1 | tail -40
timeout -k 2 19 python3 experiment/device/run1.py bench 2>&1 | tail -40
timeout -k 2 18 python3 -m pytest -q -x -n 6 tests/prefill_backward/test_prefill_backward_kernel.py -k cuda -p no:cacheprovider 2>&1 | tail -15
rm -f $OUT/bw_*.so
