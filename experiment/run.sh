timeout 15 python3 .aot/check.py
timeout 20 python3 .aot/prof.py more
( timeout 26 python3 -m pytest -q -n 6 -p no:cacheprovider tests/delta_rule/test_chunks_of_half_types.py tests/delta_rule/test_delta_rule.py tests/delta_rule/test_delta_rule_backward.py tests/delta_rule/test_kda.py -k "not cpu" 2>&1 | tail -25 ) > $OUT/tests.log &
( FLASHINFER_CUDA_ARCH_LIST=8.0+PTX timeout 26 python3 .aot/check.py 2>&1 | tail -8 ) > $OUT/portable.log &
( timeout 26 compute-sanitizer --tool memcheck python3 .aot/small.py 2>&1 | tail -12 ) > $OUT/memcheck.log &
( timeout 26 compute-sanitizer --tool racecheck python3 .aot/small.py 2>&1 | tail -12 ) > $OUT/racecheck.log &
wait; for f in tests portable memcheck racecheck; do echo "== $f"; cat $OUT/$f.log; done
